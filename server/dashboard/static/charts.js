// Charts, drawn by uPlot: lines over time, an operating curve, a histogram with the threshold in it.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** A colour of the style sheet, by its name. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart in the width of its place, drawn anew when width, colours or data change.
 *
 * `options(width)`: uPlot's, without the size. `data`: uPlot's columns. `label`: what it shows, for
 * readers who do not see it.
 */
function Chart({ options, data, label, height = 190, time = false }) {
  const place = useRef(null);
  const chart = useRef(null);
  const made = useRef("");
  useEffect(() => {
    const element = place.current;
    const draw = () => {
      const width = element.clientWidth;
      if (width < 60) return;
      const all = { width, height, ...options() };
      const shape = JSON.stringify([width, dark.matches, all.series.map((one) => one.label), all.kind]);
      if (chart.current && shape === made.current) {
        chart.current.setData(data);
        return;
      }
      if (chart.current) chart.current.destroy();
      made.current = shape;
      chart.current = new uPlot(all, data, element);
    };
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(element);
    dark.addEventListener("change", draw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", draw);
    };
  });
  useEffect(() => () => chart.current && chart.current.destroy(), []);
  return html`<div class="chart ${time ? "time" : ""}" ref=${place} role="img" aria-label=${label}></div>`;
}

// seconds between two ticks of a time axis: its labels have no seconds, and would repeat themselves
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14400].map((one) => 60 * one);

const axes = (xValues, yValues, more = {}, ySpace = 30) => [
  {
    ...more,
    stroke: colour("soft"),
    grid: { show: false },
    ticks: { show: false },
    font: "11px system-ui",
    size: 30,
    values: (_, splits) => splits.map(xValues),
  },
  {
    stroke: colour("soft"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
    size: 58,
    space: ySpace,
    values: (_, splits) => splits.map((value) => (value === null ? "" : yValues(value))),
  },
];

const legend = () => ({
  markers: { width: 0, fill: (chart, index) => chart.series[index].stroke(chart, index) },
});

const cursor = () => ({ points: { size: 7 }, drag: { x: false, y: false } });

const line = (label, name, shown, more = {}) => ({
  label,
  stroke: colour(name),
  width: 2,
  points: { show: false },
  value: (_, value) => (value === null || value === undefined ? "–" : shown(value)),
  ...more,
});

/** Lines over time or over rounds.
 *
 * `x`: ascending. `lines`: `[{label, values, colour}]`, a null where nothing is known. `shown(value)`: text
 * of a value. `time`: whether x is UTC seconds. `most`: highest value of the axis, if it is fixed.
 */
export function Lines({ x, lines, shown, time = false, xLabel = "", least = null, most = null, label, height }) {
  // an axis without a line would have a scale that means nothing
  if (!lines.some((one) => one.values.some((value) => value !== null && value !== undefined))) {
    return html`<p class="soft">${label}: nothing was measured yet.</p>`;
  }
  const few = x.length < 40;
  const options = () => ({
    kind: few,
    cursor: cursor(),
    legend: legend(),
    scales: { x: { time }, y: { range: (_, low, high) => bounds(low, high, least, most) } },
    axes: axes(
      time ? moment(x) : (value) => (Number.isInteger(value) ? value : ""),
      shown,
      time ? { incrs: MINUTES } : {},
      height < 120 ? 16 : 30, // a low chart has room for two numbers, if they may stand close
    ),
    series: [
      time ? { label: "time", value: (_, at) => (at ? moment(x)(at) : "–") } : { label: xLabel, value: (_, value) => value ?? "–" },
      ...lines.map((one) =>
        line(one.label, one.colour, shown, { spanGaps: !time, points: { show: few, size: 5 } }),
      ),
    ],
  });
  return html`<${Chart} options=${options} data=${[x, ...lines.map((one) => one.values)]} label=${label} height=${height} time=${time} />`;
}

/** Text of a moment among those of `x`: the time alone within a day. */
function moment(x) {
  const day = x.at(-1) - x[0] < 86400 ? {} : { month: "short", day: "numeric" };
  const form = new Intl.DateTimeFormat("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
  return (at) => form.format(1000 * at);
}

function bounds(low, high, least, most) {
  low = least ?? low ?? 0;
  high = most ?? high ?? 1;
  if (most === null) high += 0.08 * (high - low || Math.abs(high) || 1);
  return [low, high > low ? high : low + 1];
}

/** The operating curve of a bundle over the gate's threshold: exit rate, and how often answers are right.
 *
 * `right`: the word for that, "accuracy" or "agreement".
 */
export function OperatingCurve({ curve, threshold, unit, right }) {
  const points = [...curve].sort((a, b) => a.threshold - b.threshold);
  const percent = (value) => `${Number((100 * value).toFixed(1))} %`;
  const options = () => ({
    kind: [threshold, points.length, right],
    cursor: cursor(),
    legend: legend(),
    padding: [18, null, null, null],
    scales: { x: { time: false }, y: { range: [0, 1.04] } },
    axes: axes((value) => Number(value.toFixed(3)), percent),
    series: [
      { label: `threshold (${unit})`, value: (_, value) => (value === null ? "–" : value.toFixed(3)) },
      line("exit rate", "accent", percent, { fill: colour("accent-wash") }),
      line(`${right} of exits`, "second", percent),
      line(`${right} of all`, "third", percent, { dash: [6, 4] }),
    ],
    plugins: [marked(threshold)],
  });
  const data = [
    points.map((one) => one.threshold),
    points.map((one) => one.exit_rate),
    points.map((one) => one.exit_accuracy),
    points.map((one) => one.accuracy),
  ];
  return html`<${Chart} options=${options} data=${data} height=${230}
    label=${`Operating curve of ${points.length} thresholds; the bundle's is ${threshold}`} />`;
}

/** Counts of answers by uncertainty: what exits lies below the threshold.
 *
 * `edges`: of the bins, one more than `counts`. `heldOut`: share of the held-out samples in each bin, drawn as
 * outlines; null if it is not known. Bins are narrow near 0, where sure answers are, and
 * all are drawn equally wide.
 */
export function Histogram({ edges, counts, threshold, unit, heldOut, of }) {
  const total = counts.reduce((sum, one) => sum + one, 0) || 1;
  const percent = (value) => `${Number((100 * value).toFixed(1))} %`;
  const exits = (index) => threshold === null || edges[index + 1] <= threshold + 1e-12;
  const at = threshold === null ? null : placeOf(threshold, edges);
  const options = () => ({
    kind: [at, edges.length, edges.at(-1), of],
    cursor: { ...cursor(), points: { show: false } },
    legend: legend(),
    padding: [18, null, null, null],
    scales: { x: { time: false, range: [0, counts.length] }, y: { range: (_, __, high) => [0, 1.06 * (high || 1)] } },
    axes: axes((place) => Number(valueAt(place, edges).toFixed(2)), percent),
    series: [
      { label: `uncertainty (${unit})`, value: (_, place) => (place === null ? "–" : valueAt(place, edges).toFixed(3)) },
      line("exits", "accent", percent, { width: 0, fill: colour("accent"), paths: bars() }),
      line("offloads", "second", percent, { width: 0, fill: colour("second"), paths: bars() }),
      ...(heldOut ? [line("held-out samples", "text", percent, { width: 1.25, paths: bars() })] : []),
    ],
    plugins: at === null ? [] : [marked(at)],
  });
  const data = [
    counts.map((_, index) => index + 0.5),
    counts.map((count, index) => (exits(index) ? count / total : null)),
    counts.map((count, index) => (exits(index) ? null : count / total)),
    ...(heldOut ? [heldOut] : []),
  ];
  return html`<${Chart} options=${options} data=${data} height=${210}
    label=${`Histogram of the uncertainty of ${total} answers with ${of}; the threshold is ${threshold}${heldOut ? "; outlines show the held-out samples" : ""}`} />`;
}

/** The value at a place of the axis, on which each bin is 1 wide. */
function valueAt(place, edges) {
  const bin = Math.max(0, Math.min(edges.length - 2, Math.floor(place)));
  return edges[bin] + (place - bin) * (edges[bin + 1] - edges[bin]);
}

/** The place of a value on that axis. */
function placeOf(value, edges) {
  const above = edges.findIndex((edge) => edge > value);
  if (above <= 0) return above === 0 ? 0 : edges.length - 1;
  return above - 1 + (value - edges[above - 1]) / (edges[above] - edges[above - 1]);
}

const bars = () => uPlot.paths.bars({ size: [0.9, 60], radius: 0.12 });

/** A vertical line at the threshold. */
function marked(threshold) {
  return {
    hooks: {
      draw: (chart) => {
        const x = chart.valToPos(threshold, "x", true);
        const { left, top, width, height } = chart.bbox;
        if (x < left || x > left + width) return;
        const pen = chart.ctx;
        pen.save();
        pen.strokeStyle = colour("text");
        pen.fillStyle = colour("text");
        pen.lineWidth = 1.5 * devicePixelRatio;
        pen.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
        pen.beginPath();
        pen.moveTo(x, top);
        pen.lineTo(x, top + height);
        pen.stroke();
        pen.font = `${11 * devicePixelRatio}px system-ui`;
        const right = x > left + width - 90 * devicePixelRatio;
        pen.textAlign = right ? "right" : "left";
        pen.fillText("threshold", x + (right ? 0 : -2) * devicePixelRatio, top - 5 * devicePixelRatio);
        pen.restore();
      },
    },
  };
}
