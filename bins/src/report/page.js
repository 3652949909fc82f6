"use strict";
// What a page cannot do without a script: values under the pointer, and turning runs and smoothing on and off.
(() => {
  const { names, curves } = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const hidden = new Set();
  document.documentElement.classList.add("live");

  for (const box of all(".legend input[data-run]")) {
    const toggle = () => {
      const run = Number(box.dataset.run);
      box.checked ? hidden.delete(run) : hidden.add(run);
      all(`.chart [data-run="${run}"]`).forEach((part) => part.classList.toggle("off", !box.checked));
    };
    box.addEventListener("change", toggle);
    toggle(); // A browser may remember a box from the last visit.
  }
  const smoothing = document.getElementById("smoothing");
  const smooth = () => document.body.classList.toggle("raw", !smoothing.checked);
  if (smoothing) smoothing.addEventListener("change", smooth), smooth();

  const words = {
    plain: (x) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(3).replace(/\.?0+e/, "e") : x.toFixed(4)),
    share: (x) => (100 * x).toFixed(1) + " %",
    count: (x) => Math.round(x).toLocaleString("en"),
    gib: (x) => x.toFixed(3) + " GiB",
  };
  const element = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };

  // The place in the sorted `steps` that is nearest to `step`.
  const nearest = (steps, step) => {
    let [low, high] = [0, steps.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      steps[middle] < step ? (low = middle + 1) : (high = middle);
    }
    return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
  };

  all("figure[data-curve]").forEach((figure, which) => {
    const { unit, runs } = curves[which];
    const chart = figure.querySelector(".chart");
    const whole = chart.viewBox.baseVal.width;
    const [left, top, width, height] = chart.dataset.plot.split(" ").map(Number);
    const [x0, x1] = chart.dataset.x.split(" ").map(Number);
    const column = (x1 - x0) / whole;
    const [y0, y1] = chart.dataset.y.split(" ").map(Number);
    const tip = document.createElement("div");
    const marks = element("g", {});
    let at = null;
    tip.className = "tip";
    tip.hidden = true;
    chart.after(tip);
    chart.append(marks);

    const hide = () => { at = null; tip.hidden = true; marks.replaceChildren(); };
    const show = (wanted) => {
      const shown = runs.map((run, i) => ({ ...run, i })).filter((run) => run.s.length && !hidden.has(run.i));
      if (!shown.length) return hide();
      const steps = shown.map((run) => run.s[nearest(run.s, wanted)]);
      at = steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
      const x = left + ((at - x0) / (x1 - x0)) * width;
      const head = document.createElement("b");
      head.textContent = "step " + at.toLocaleString("en");
      tip.replaceChildren(head);
      marks.replaceChildren(element("path", { class: "cursor", d: `M${x} ${top}V${top + height}` }));
      for (const { s, v, i } of shown) {
        const k = nearest(s, at);
        if (Math.abs(s[k] - at) > Math.max(0.5, 1.5 * column)) continue;
        const row = document.createElement("div");
        const sample = document.querySelector(`.sample[data-run="${i}"]`);
        const name = document.createElement("span");
        const value = document.createElement("span");
        name.textContent = names[i];
        value.className = "value";
        value.textContent = v[k] === null ? "none" : words[unit](v[k]);
        row.append(sample.cloneNode(true), name, value);
        tip.append(row);
        if (v[k] === null) continue;
        const y = top + (1 - (v[k] - y0) / (y1 - y0)) * height;
        const colour = element("g", { class: `run c${i % 7}` });
        colour.append(element("path", { "stroke-width": 8, "stroke-linecap": "round", d: `M${x} ${y}h0` }));
        marks.append(colour);
      }
      tip.hidden = false;
      // Beside the cursor, on the side that has room.
      const scale = chart.getBoundingClientRect().width / whole;
      const room = tip.parentElement.clientWidth;
      const place = x * scale + 14 + tip.offsetWidth < room ? x * scale + 14 : x * scale - 14 - tip.offsetWidth;
      tip.style.left = Math.max(0, place) + "px";
    };

    const follow = (event) => {
      const box = chart.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * whole - left) / width;
      share < -0.03 || share > 1.03 ? hide() : show(x0 + share * (x1 - x0));
    };
    chart.addEventListener("pointermove", follow);
    chart.addEventListener("pointerdown", follow);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      show(at === null ? (way > 0 ? x0 : x1) : at + way * Math.max(1, column));
    });
  });

  // On paper nothing can be opened.
  const closed = () => all(".settings details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => (opened = closed()).forEach((part) => (part.open = true)));
  addEventListener("afterprint", () => opened.forEach((part) => (part.open = false)));
})();
