/* Random numbers: Philox's 4 words of 64 bits for each counter from one on (Salmon et al. 2011), as in NumPy. */

#define SHARDS 128
/* Each shard has so many numbers, and a key of two words, here or elsewhere. */
struct draws { i64 shards, each; double p; const u64 *elsewhere; u64 keys[2 * SHARDS]; };
INLINE void philox(u64 counter, u64 key, u64 other_key, u64 *words) {
    u64 a = counter, b = 0, c = 0, d = 0;
    for (int round = 0; round < 10; round++) {
        u64 low = 0xd2e7470ee14c6c93 * a, high = upper_half(0xd2e7470ee14c6c93, a);
        u64 other_low = 0xca5a826395121157 * c, other_high = upper_half(0xca5a826395121157, c);
        a = other_high ^ b ^ key, b = other_low, c = high ^ d ^ other_key, d = low;
        key += 0x9e3779b97f4a7c15, other_key += 0xbb67ae8584caa73b;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}
struct drawn { float *y; const struct draws *all; };
PART(bernoulli_part, struct drawn, s) {
    BEGIN(struct drawn, s)
    const struct draws *all = s->all;
    i64 fours = (all->each + 3) / 4;
    const u64 *keys = all->elsewhere ? all->elsewhere : all->keys;
    EVERY(i) {
        i64 shard = i / fours, four = i % fours;
        u64 words[4];
        philox((u64)four + 1, keys[2 * shard], keys[2 * shard + 1], words);
        for (i64 k = 0; k < 4 && 4 * four + k < all->each; k++)
            s->y[shard * all->each + 4 * four + k] = (double)(i64)(words[k] >> 11) * 0x1p-53 < all->p ? 1 : 0;
    }
}
#ifdef __CUDACC__
API void bernoulli(float *y, const struct draws draws) {
    struct drawn s = {y, &draws};
    RUN(bernoulli_part, s, draws.shards * ((draws.each + 3) / 4), 0);
}
#else
API void bernoulli(float *y, const struct draws *draws, unsigned threads) {
    struct drawn s = {y, draws};
    RUN(bernoulli_part, s, draws->shards * ((draws->each + 3) / 4), draws->shards * draws->each);
}
#endif
