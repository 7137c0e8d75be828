// Keeps a page up to date while its job or federation changes, and draws charts. Pages work without it, as they stood
// when they were loaded.
"use strict";

const COLOURS = ["#2f6fde", "#d9622b", "#2b9a66", "#a34fc4", "#b08c0a", "#1d9bb0", "#c33f6e", "#6c7686"];
const TITLES = {
  seconds: "seconds", usd: "cost", wan_bytes: "bytes sent to other regions",
  samples_per_second: "samples a second", cpu_cores: "CPU cores in use", memory_bytes: "memory of the largest worker",
  gpu_memory_bytes: "GPU memory of the largest worker", test_loss: "test loss",
};
const BYTES = [TITLES.wan_bytes, TITLES.memory_bytes, TITLES.gpu_memory_bytes];
const GOOD = ["up", "live", "training", "finished", "published", "succeeded"];
const BAD = ["down", "lost", "failed", "refused"];

// Titles take a few HTML tags; names of metrics are the task's.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
// Three digits at least, and no exponent.
const figure = (value) => value.toLocaleString("en",
  Math.abs(value) >= 999.5 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What the charts are drawn by: round, step or time.
const axisOf = () => document.getElementById("axis")?.value || "round";

// Where a round stands on that axis; one without a report stands between its neighbours. Several jobs are compared by
// the minutes since their first report.
function placed(jobs, job, region) {
  const by = axisOf(), known = job.axes[region];
  if (by === "round" || !known) return (round) => round;
  const since = Math.min(...Object.values(job.axes).map((axes) => axes.at[0]));
  const time = (seconds) => (jobs.length > 1 ? (seconds - since) / 60 : 1000 * seconds);
  const value = (at) => (by === "step" ? known.step[at] : time(known.at[at]));
  return (round) => {
    const next = known.round.findIndex((one) => one >= round);
    if (next < 0) return value(known.round.length - 1);
    if (known.round[next] === round || next === 0) return value(next);
    const share = (round - known.round[next - 1]) / (known.round[next] - known.round[next - 1]);
    return value(next - 1) + share * (value(next) - value(next - 1));
  };
}

// ``jobs``: of a chart by rounds, steps or time.
function layout(title, jobs) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
  return {
    title: { text: jobs ? `${title} by ${axisOf()}` : title, font: { size: 14 }, x: 0, xanchor: "left" }, height: 260, autosize: true,
    margin: { l: 48, r: 8, t: 36, b: 32 }, hovermode: "x unified", showlegend: true,
    legend: { orientation: "h", y: -0.15 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--head"), font: { color: colour("--text") } },
    xaxis: jobs && axisOf() === "time"
      ? { ...axis, type: jobs.length > 1 ? "linear" : "date", ticksuffix: jobs.length > 1 ? " min" : "" }
      : axis,
    yaxis: {
      ...axis,
      ...(title === TITLES.usd ? { tickprefix: "$", exponentformat: "none" } : {}),
      // 4GB, not 4B for four billion.
      ...(BYTES.includes(title) ? { exponentformat: "SI", ticksuffix: "B" } : {}),
    }, uirevision: axisOf(),
  };
}

// Several jobs are told apart by their dashes, their regions by colours.
function lines(jobs, name) {
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const regions = [...new Set(jobs.flatMap((job) => job.charts.flatMap((c) => c.lines.map((l) => l.region))))].sort();
  return jobs.flatMap((job, number) =>
    job.charts.filter((chart) => chart.name === name).flatMap((chart) => chart.lines.map((line) => ({
      x: line.x.map(placed(jobs, job, line.region)), y: line.y, type: "scatter", mode: line.x.length > 60 ? "lines" : "lines+markers",
      name: plain(jobs.length > 1 ? `${job.label} ${line.region}` : line.region), marker: { size: 4 },
      line: { color: COLOURS[regions.indexOf(line.region) % COLOURS.length], dash: dashes[number % 4], width: 2 },
    }))));
}

// Of a value that adds up over regions, the plan's range is that of the sum.
function total(jobs, name) {
  const chart = jobs.length === 1 && jobs[0].charts.find((one) => one.name === name);
  if (!chart || !chart.range) return { traces: [], shapes: [] };
  const rounds = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const last = chart.lines.map(() => 0), at = chart.lines.map(() => 0);
  const sums = rounds.map((round) => {
    chart.lines.forEach((line, n) => {
      while (at[n] < line.x.length && line.x[at[n]] <= round) last[n] = line.y[at[n]++];
    });
    return last.reduce((sum, value) => sum + value, 0);
  });
  const longest = chart.lines.reduce((a, b) => (b.x.at(-1) > a.x.at(-1) ? b : a)).region;
  const sum = { x: rounds.map(placed(jobs, jobs[0], longest)), y: sums, type: "scatter", mode: "lines", name: "all",
    line: { color: colour("--text"), width: 2 } };
  const band = { type: "rect", xref: "paper", x0: 0, x1: 1, y0: chart.range[0], y1: chart.range[1],
    fillcolor: colour("--faint"), opacity: 0.18, line: { width: 0 }, layer: "below" };
  return { traces: chart.lines.length > 1 ? [sum] : [], shapes: [band] };
}

function network(found) {
  const count = found.regions.length, place = {};
  found.regions.forEach((region, n) => {
    place[region.name] = [Math.cos((2 * Math.PI * n) / count), Math.sin((2 * Math.PI * n) / count)];
  });
  const edges = found.links.filter((link) => place[link.source] && place[link.destination]);
  const traces = edges.map((link) => {
    const [[a, b], [c, d]] = [place[link.source], place[link.destination]];
    const state = BAD.includes(link.state) ? "--bad" : GOOD.includes(link.state) ? "--good" : "--wait";
    return { x: [a, c], y: [b, d], mode: "lines", type: "scatter", hoverinfo: "skip",
      line: { color: colour(state), width: 2, dash: state === "--good" ? "solid" : "dot" } };
  });
  // A link is pointed at near its source: those of both directions lie on one line.
  traces.push({
    type: "scatter", mode: "markers", marker: { size: 14, opacity: 0 }, hoverinfo: "text",
    x: edges.map((l) => 0.7 * place[l.source][0] + 0.3 * place[l.destination][0]),
    y: edges.map((l) => 0.7 * place[l.source][1] + 0.3 * place[l.destination][1]),
    text: edges.map((l) => plain(`${l.source} → ${l.destination}: ${l.state}`) +
      (l.rtt_ms === null ? "" : `<br>${figure(l.rtt_ms)} ms`) +
      (l.goodput_mbps === null ? "" : `<br>${figure(l.goodput_mbps)} Mbit/s`) + `<br>${plain(l.codec)}`),
  });
  traces.push({
    type: "scatter", mode: "markers+text", text: found.regions.map((r) => r.name), textposition: "top center",
    x: found.regions.map((r) => place[r.name][0]), y: found.regions.map((r) => place[r.name][1]), hoverinfo: "text",
    hovertext: found.regions.map((r) => plain(`${r.name}: ${r.state}`)),
    marker: { size: 16, color: found.regions.map((r) => colour(BAD.includes(r.state) ? "--bad" : "--busy")) },
  });
  const hidden = { visible: false, range: [-1.5, 1.5] };
  return [traces, { ...layout("links"), showlegend: false, hovermode: "closest", xaxis: hidden, yaxis: hidden }];
}

// The rounds of each region as bars over time, each divided into what it was spent on.
const PARTS = [["compute", "#2f6fde"], ["merge", "#a34fc4"], ["exchange", "#d9622b"], ["wait", "#b08c0a"],
  ["evaluate", "#2b9a66"], ["other", "#7d8793"]];

function timeline(regions) {
  const look = layout("time of rounds"), height = 34 * regions.length;
  const traces = PARTS.map(([part, fill], n) => {
    const bars = regions.flatMap(({ region, rounds }) => rounds.map(([first, last, begin, ...seconds]) => ({
      region, seconds: seconds[n], begin: begin + seconds.slice(0, n).reduce((sum, one) => sum + one, 0),
      text: `${first === last ? `round ${first}` : `rounds ${first} to ${last}`}, ${part}: ${figure(seconds[n])} s`,
    })).filter((bar) => bar.seconds > 0));
    return {
      type: "bar", orientation: "h", name: part, marker: { color: fill }, hoverinfo: "text",
      base: bars.map((bar) => new Date(bar.begin * 1000).toISOString()), x: bars.map((bar) => bar.seconds * 1000),
      y: bars.map((bar) => plain(bar.region)), hovertext: bars.map((bar) => plain(`${bar.region}, ${bar.text}`)),
    };
  });
  return [traces, { ...look, barmode: "overlay", bargap: 0.3, hovermode: "closest", height: 130 + height,
    margin: { ...look.margin, b: 94 }, legend: { orientation: "h", y: -46 / height, yanchor: "top" },
    xaxis: { ...look.xaxis, type: "date" }, yaxis: { ...look.yaxis, autorange: "reversed", type: "category" } }];
}

// Regions and links of the whole federation.
async function drawFederation() {
  const place = document.getElementById("federation");
  if (!place || !window.Plotly) return;
  const answer = await fetch(place.dataset.network);
  if (!answer.ok) throw new Error(`${place.dataset.network}: ${answer.status}`);
  let chart = place.querySelector(".plot");
  if (!chart) {
    chart = document.createElement("div");
    chart.className = "plot";
    chart.id = "chart-federation";
    chart.setAttribute("role", "img");
    chart.setAttribute("aria-label", "regions and the links between them");
    place.append(chart);
  }
  const [traces, look] = network(await answer.json());
  await window.Plotly.react(chart, traces, look, { displayModeBar: false, responsive: true });
}

async function draw() {
  await drawFederation();
  const place = document.getElementById("charts");
  if (!place || !window.Plotly) return;
  const jobs = await Promise.all(place.dataset.series.split(" ").map(async (url) => {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    return answer.json();
  }));
  jobs.forEach((job) => {
    const same = jobs.filter((other) => other.name === job.name).length > 1;
    job.label = same ? `${job.name} ${job.job.slice(-4)}` : job.name;
  });
  const names = [...new Set(jobs.flatMap((job) => job.charts.map((chart) => chart.name)))];
  const wanted = names.map((name) => {
    const { traces, shapes } = total(jobs, name);
    return [name, [...lines(jobs, name), ...traces], { ...layout(Object.hasOwn(TITLES, name) ? TITLES[name] : plain(name), jobs), shapes }];
  });
  if (jobs.length === 1 && jobs[0].network.links.length) wanted.push([" links", ...network(jobs[0].network)]);
  if (jobs.length === 1 && jobs[0].timeline.length) wanted.push([" time", ...timeline(jobs[0].timeline)]);
  for (const [name, traces, look] of wanted) {
    let chart = document.getElementById(`chart-${name}`);
    if (!chart) {
      chart = document.createElement("div");
      chart.id = `chart-${name}`;
      chart.className = name === " time" ? "plot wide" : "plot";
      const own = name === " time" && document.getElementById("timeline");
      chart.setAttribute("role", "img");
      (own || place).append(chart);
    }
    chart.setAttribute("aria-label", look.title.text);
    await window.Plotly.react(chart, traces, look, { displayModeBar: false, responsive: true });
  }
  document.getElementById("drawing")?.remove();
}

// Replace the parts of the page that have changed, but what the user has opened, typed into or selected.
async function refresh() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.status === 401) return location.reload();
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = page.querySelector(`[data-part="${part.dataset.part}"]`);
    const used = [document.activeElement, document.getSelection()?.isCollapsed ? null : document.getSelection()?.anchorNode];
    if (!other || part.matches("details[open]") || used.some((node) => node && part.contains(node))) continue;
    const scrolled = [...part.querySelectorAll(".scroll")].map((place) => place.scrollLeft);
    for (const open of part.querySelectorAll("details[open][data-keep]"))
      other.querySelector(`[data-keep="${open.dataset.keep}"]`)?.setAttribute("open", "");
    for (const box of part.querySelectorAll("input:checked"))
      other.querySelector(`input[value="${box.value}"]`)?.setAttribute("checked", "");
    if (other.innerHTML === part.innerHTML) continue;
    part.innerHTML = other.innerHTML;
    part.querySelectorAll(".scroll").forEach((place, n) => { place.scrollLeft = scrolled[n] || 0; });
  }
  await draw();
}

// Browsers allow few connections to one server: a page that nobody looks at has none.
function follow(url) {
  let source = null, waiting = false, again = false, ended = false;
  const run = async () => {
    if (waiting) { again = true; return; }
    waiting = true;
    await refresh().catch(console.error);
    setTimeout(() => { waiting = false; if (again) { again = false; run(); } }, 1000);
  };
  const close = () => { source?.close(); source = null; };
  const open = () => {
    if (source || ended || document.hidden) return;
    source = new EventSource(url);
    source.addEventListener("change", run);
    source.addEventListener("end", () => { ended = true; close(); run(); });
    // A refused stream is not opened again by itself: the session has ended, or the control plane is not there.
    source.addEventListener("error", () => {
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      run();
      setTimeout(open, 5000);
    });
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return close();
    open();
    run();
  });
  open();
}

document.addEventListener("DOMContentLoaded", () => {
  draw().catch(console.error);
  document.getElementById("axis")?.addEventListener("change", () => draw().catch(console.error));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw().catch(console.error));
  if (document.body.dataset.live) follow(document.body.dataset.live);
});
