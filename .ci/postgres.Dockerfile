# A stand-in for the official image of PostgreSQL, out of Debian's package: as much of its interface as is used here.
ARG BASE
FROM ${BASE}
# hadolint ignore=DL3008,DL3009
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql && \
    install -d -o postgres -m 700 /var/lib/postgresql/data && install -d -m 1777 /var/run/postgresql
ENV PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
COPY postgres-start /usr/local/bin/
RUN ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ 2>/dev/null || true
CMD ["postgres-start"]
