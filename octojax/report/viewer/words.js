// Times, sizes and events in words.

const KIND_NAMES = {
  F: "forward",
  B: "backward",
  I: "input gradient",
  W: "weight gradient",
  R: "recompute",
};
const CAUSE_NAMES = {
  "fill and drain": "fill and drain: before its first or after its last action",
  dependency: "dependency: another rank has not made the value yet",
  transfer: "transfer: the value is made and has not arrived",
  host: "host: the value is there and the action is not launched yet",
  imbalance: "imbalance: this rank has less work than the busiest",
};
const TIME_UNITS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
  [1e-9, "ns"],
];

function digits(value) {
  return String(+value.toPrecision(4));
}

function unitOf(value) {
  const size = Math.abs(value);
  return TIME_UNITS.find(([factor]) => size >= factor) ?? TIME_UNITS[size ? 3 : 0];
}

/** Returns a time of a panel: four digits and a fitting unit. */
function timeText(value, unit) {
  if (unit !== "s") return `${digits(value)} ${unit}`;
  const [factor, name] = unitOf(value);
  return `${digits(value / factor)} ${name}`;
}

/** Returns a difference of times, with its sign. */
function differenceText(value, unit) {
  return (value < 0 ? "−" : "+") + timeText(Math.abs(value), unit);
}

function bytesText(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return `${digits(value)} ${unit}`;
    value /= 1024;
  }
  return `${digits(value)} TiB`;
}

function shareText(share) {
  return `${(100 * share).toFixed(1)} %`;
}

/** Returns `[time, label]` of round marks from `from` to `to`, at most `most` + 1 of them. */
function ticksOf(from, to, most, unit) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => power * m >= rough * (1 - 1e-9));
  const [factor, name] = unit === "s" ? unitOf(Math.max(Math.abs(from), Math.abs(to))) : [1, ""];
  const decimals = Math.max(0, Math.min(12, Math.ceil(-Math.log10(step / factor) - 1e-9)));
  const marks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to * (1 + 1e-12); i++) {
    marks.push([i * step, `${((i * step) / factor).toFixed(decimals)} ${name}`.trim()]);
  }
  return marks;
}

function partText(panel, action, half) {
  const kind = panel.kind[action];
  const letter = kind === OVERLAP ? "FB"[half] : KINDS[kind];
  return panel.stages[half][action] + letter + panel.microbatches[half][action];
}

/** Returns the text of an action, such as `3F7`, or of a transfer, such as `3SEND_F7`. */
function nameOf(panel, event) {
  if (event < 0) return "the start of the step";
  if (event < panel.count) {
    if (panel.kind[event] !== OVERLAP) return partText(panel, event, 0);
    return `(${partText(panel, event, 0)};${partText(panel, event, 1)})`;
  }
  const t = event - panel.count;
  const { stage, kind, microbatch } = panel.transfers;
  return `${stage[t]}SEND_${String.fromCharCode(kind[t])}${microbatch[t]}`;
}

/** Returns the numbers of the transfers that bring an action's inputs, or take its outputs. */
function transfersOf(panel, action, side) {
  const numbers = [];
  const ends = panel.transfers[side];
  for (let t = 0; t < ends.length; t++) if (ends[t] === action) numbers.push(t);
  return numbers;
}

function layersOf(panel, action) {
  const halves = panel.kind[action] === OVERLAP ? [0, 1] : [0];
  return halves.map((half) => panel.layers[panel.stages[half][action]]).filter(Boolean);
}

/** Returns the idle times just before an action, with what they waited for. */
function waitsOf(panel, action) {
  const waits = [];
  const { gaps } = panel;
  const rank = panel.rank[action];
  const from = action > panel.first[rank] ? panel.end[action - 1] : 0;
  for (let g = 0; g < gaps.count; g++) {
    const inside = gaps.start[g] < panel.start[action] && gaps.end[g] > from;
    if (gaps.rank[g] === rank && inside) waits.push(g);
  }
  return waits;
}

function waitText(panel, gap) {
  const { gaps } = panel;
  const time = timeText(gaps.end[gap] - gaps.start[gap], panel.unit);
  const on = gaps.on[gap];
  if (CAUSES[gaps.wait[gap]] === "host" || on < 0) return `${time} for the host to launch it`;
  const name = nameOf(panel, on);
  if (on < panel.count) return `${time} for ${name}, which rank ${panel.rank[on]} computed`;
  return `${time} for ${name}, the transfer from rank ${panel.transfers.source[on - panel.count]}`;
}

/** Returns lines about an action: what, where, when, how many bytes, and what it waited for. */
function actionLines(panel, action) {
  const unit = panel.unit;
  const kind = panel.kind[action];
  const what = kind === OVERLAP ? "forward and backward as one" : KIND_NAMES[KINDS[kind]];
  const lines = [
    `${nameOf(panel, action)}: ${what} on rank ${panel.rank[action]}`,
    ...layersOf(panel, action).map((text) => `stage ${text}`.replace("stage layer", "layer")),
    `${timeText(panel.start[action], unit)} to ${timeText(panel.end[action], unit)}, ` +
      `takes ${timeText(panel.end[action] - panel.start[action], unit)}`,
  ];
  const { size, source, target } = panel.transfers;
  for (const t of transfersOf(panel, action, "taker")) {
    lines.push(`received ${bytesText(panel.sizes[size[t]])} from rank ${source[t]}`);
  }
  for (const t of transfersOf(panel, action, "maker")) {
    lines.push(`sent ${bytesText(panel.sizes[size[t]])} to rank ${target[t]}`);
  }
  const waits = waitsOf(panel, action);
  for (const gap of waits) lines.push(`waited ${waitText(panel, gap)}`);
  if (!waits.length) lines.push("did not wait");
  return lines;
}

/** Returns lines about a piece of idle time. */
function idleLines(panel, piece) {
  const { code, of, start, end } = panel.pieces;
  const gap = of[piece];
  const from = gap < 0 ? start[piece] : panel.gaps.start[gap];
  const to = gap < 0 ? end[piece] : panel.gaps.end[gap];
  const lines = [
    `bubble of ${timeText(to - from, panel.unit)}`,
    CAUSE_NAMES[CAUSES[code[piece] - IDLE]],
    `${timeText(from, panel.unit)} to ${timeText(to, panel.unit)}`,
  ];
  if (gap >= 0) lines.push(`waited ${waitText(panel, gap)}`);
  return lines;
}

/** Returns lines about where a rank's time goes, and how that differs from the first panel. */
function rankLines(panel, rank, base) {
  const sums = new Map();
  const { first, start, end, code } = panel.pieces;
  for (let i = first[rank]; i < first[rank + 1]; i++) {
    if (code[i] >= IDLE) sums.set(code[i], (sums.get(code[i]) ?? 0) + end[i] - start[i]);
  }
  const share = (time) =>
    `${timeText(time, panel.unit)} (${shareText(time / (panel.makespan_s || 1))})`;
  const busy = panel.busy_s[rank];
  const lines = [`rank ${rank}`, `busy ${share(busy)}`];
  for (const [cause, time] of [...sums].sort((a, b) => a[0] - b[0])) {
    lines.push(`${CAUSES[cause - IDLE]} ${share(time)}`);
  }
  if (panel.peaks[rank]) lines.push(`at most ${bytesText(panel.peaks[rank])}`);
  lines.push(`at most ${panel.peak_microbatches[rank]} microbatches`);
  if (panel !== base && rank < base.ranks) {
    const more = (own, other) => differenceText(own - other, panel.unit);
    const idle = [panel, base].map((p) => p.makespan_s - p.busy_s[rank]);
    lines.push(
      `against ${base.letter}: busy ${more(busy, base.busy_s[rank])}, bubble ${more(...idle)}`,
    );
  }
  return lines;
}

/** Returns lines about what a rank's memory holds at a time. */
function memoryLines(panel, rank, time) {
  const { first, time: times, level } = panel.memory;
  const i = above(times, time, first[rank], first[rank + 1]) - 1;
  const now = i >= first[rank] ? level[i] : 0;
  const capacity = panel.capacities_bytes[rank];
  return [
    `memory of rank ${rank}: ${bytesText(now)}`,
    `at ${timeText(time, panel.unit)}`,
    `at most ${bytesText(panel.peaks[rank])}${capacity ? ` of ${bytesText(capacity)}` : ""}`,
  ];
}
