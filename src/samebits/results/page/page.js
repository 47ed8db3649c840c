// What the page can do beyond being read: copy, a choice of colours, all of it in print, values under the pointer, and
// another host's hash. The page says everything without it.
const root = document.documentElement;
root.classList.add("js");

const kept = {
  get() { try { return localStorage.getItem("theme"); } catch { return null; } },
  set(theme) { try { localStorage.setItem("theme", theme); } catch { /* a sandboxed frame keeps nothing */ } },
};
if (kept.get()) root.dataset.theme = kept.get();
document.getElementById("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  kept.set(root.dataset.theme);
};

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const shown = button.classList.contains("chip") ? button.querySelector("code") : button;
    const text = shown.textContent;
    try { await navigator.clipboard.writeText(button.dataset.copy); shown.textContent = "copied"; }
    catch { shown.textContent = "not allowed"; }
    setTimeout(() => { shown.textContent = text; }, 1200);
  });
}

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach(one => { one.open = true; });
});
addEventListener("afterprint", () => closed.forEach(one => { one.open = false; }));

for (const field of document.querySelectorAll("input.other")) {
  field.addEventListener("input", () => {
    const given = field.value.trim().toLowerCase();
    const same = field.dataset.own.split(" ").every(own => own.startsWith(given));
    field.closest("p").querySelector("output").textContent =
      given.length < 8 ? "" : same ? "= the same bits" : "≠ other bits";
  });
}

const round = (value, digits) => Number(value.toPrecision(digits));
for (const plot of document.querySelectorAll(".plot")) {
  const [[left, right], [low, high]] = [plot.dataset.x, plot.dataset.y].map(ends => ends.split(" ").map(Number));
  const lines = [...plot.querySelectorAll("polyline")].map(line => [
    line.dataset.name,
    line.getAttribute("points").split(" ").map(point => point.split(",").map(Number)),
  ]);
  const output = plot.parentElement.querySelector("output");
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const at = 100 * (event.clientX - box.left) / box.width;
    output.textContent = lines.map(([name, points]) => {
      const [x, y] = points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
      return `${name} at ${round(left + x / 100 * (right - left), 3)}: ${round(low + (100 - y) / 100 * (high - low), 5)}`;
    }).join("; ");
  });
  plot.addEventListener("pointerleave", () => { output.textContent = ""; });
}
