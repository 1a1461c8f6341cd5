// From the page's data to arrays: the actions, transfers, idle times and memory of every panel.
// `octojax/report/arrays.py` writes what is read here.

const KINDS = ["F", "B", "I", "W", "R"];
const CAUSES = ["fill and drain", "dependency", "transfer", "host", "imbalance"];
// What fills a piece of a row: a kind of action (its place in KINDS), a forward and a backward
// that run as one, or a cause of idle time (its place in CAUSES, after IDLE).
const OVERLAP = KINDS.length;
const IDLE = OVERLAP + 1;
const CODES = IDLE + CAUSES.length;
const DEPENDENCY = 1;
const IMBALANCE = 4;

/** Returns the bytes of deflated base 64. */
async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Returns the named int32 columns of a panel. */
async function columnsOf(panel) {
  const bytes = await inflate(panel.blob);
  const columns = {};
  let at = 0;
  for (const [name, length, differences] of panel.columns) {
    const numbers = new Int32Array(length);
    for (let plane = 0; plane < 4; plane++) {
      for (let i = 0; i < length; i++) numbers[i] |= bytes[at++] << (8 * plane);
    }
    if (differences)
      for (let i = 1; i < length; i++) numbers[i] = (numbers[i] + numbers[i - 1]) | 0;
    columns[name] = numbers;
  }
  return columns;
}

function scaled(numbers, factor) {
  const values = new Float64Array(numbers.length);
  for (let i = 0; i < numbers.length; i++) values[i] = numbers[i] * factor;
  return values;
}

/** Returns a panel ready to draw; times are seconds (or units) from the start of the step. */
async function readPanel(data, number) {
  const c = await columnsOf(data);
  const ends = (start, length) => {
    const values = new Float64Array(start.length);
    for (let i = 0; i < start.length; i++) values[i] = (start[i] + length[i]) * data.tick_s;
    return values;
  };
  const count = c.start.length;
  const panel = {
    ...data,
    number,
    letter: String.fromCharCode(65 + (number % 26)),
    count,
    first: c.first,
    start: scaled(c.start, data.tick_s),
    end: ends(c.start, c.length),
    kind: c.kind,
    stages: [c.stage0, c.stage1],
    microbatches: [c.microbatch0, c.microbatch1],
    before: c.before.map((step, i) => i - step),
    slack: scaled(c.slack, data.tick_s),
    transfers: {
      count: c.transfer_start.length,
      start: scaled(c.transfer_start, data.tick_s),
      end: ends(c.transfer_start, c.transfer_length),
      source: c.transfer_source,
      target: c.transfer_target,
      stage: c.transfer_stage,
      kind: c.transfer_kind,
      microbatch: c.transfer_microbatch,
      maker: c.transfer_maker,
      taker: c.transfer_taker,
      size: c.transfer_size,
      before: c.transfer_before.map((step, i) => count + i - step),
      slack: scaled(c.transfer_slack, data.tick_s),
    },
    gaps: {
      count: c.gap_start.length,
      rank: c.gap_rank,
      start: scaled(c.gap_start, data.tick_s),
      end: ends(c.gap_start, c.gap_length),
      cause: c.gap_cause,
      wait: c.gap_wait,
      on: c.gap_on,
    },
    memory: {
      first: c.memory_first,
      time: scaled(c.memory_time, data.tick_s),
      level: scaled(c.memory_level, data.memory_unit),
    },
    mask: null, // which actions are not dimmed; null: all of them
  };
  panel.rank = new Int32Array(count);
  for (let r = 0; r < panel.ranks; r++) panel.rank.fill(r, c.first[r], c.first[r + 1]);
  panel.shade = shadesOf(panel);
  panel.pieces = piecesOf(panel);
  panel.peaks = peaksOf(panel);
  panel.criticalPath = chainTo(panel, lastAction(panel));
  return panel;
}

/** Returns which of its rank's stages each action belongs to: later ones are drawn paler. */
function shadesOf(panel) {
  const shades = new Uint8Array(panel.count);
  for (let r = 0; r < panel.ranks; r++) {
    const [from, to] = [panel.first[r], panel.first[r + 1]];
    const stages = [...new Set(panel.stages[0].subarray(from, to))].sort((a, b) => a - b);
    const place = new Map(stages.map((stage, i) => [stage, Math.min(i, SHADES - 1)]));
    for (let i = from; i < to; i++) shades[i] = place.get(panel.stages[0][i]);
  }
  return shades;
}

/** Returns every rank's time from zero to the makespan as pieces without holes between them.
 *
 * Of idle time that waits for computation, the rank's share of imbalance comes last.
 */
function piecesOf(panel) {
  const { gaps } = panel;
  const most = 2 * panel.count + 3 * gaps.count + 2 * panel.ranks;
  const pieces = {
    first: new Int32Array(panel.ranks + 1),
    start: new Float64Array(most),
    end: new Float64Array(most),
    code: new Uint8Array(most),
    of: new Int32Array(most), // number of the action or idle time; -1: of none
  };
  let n = 0;
  let gap = 0;
  let at = 0;
  const put = (until, code, of) => {
    if (until <= at) return;
    pieces.start[n] = at;
    pieces.end[n] = at = until;
    pieces.code[n] = code;
    pieces.of[n++] = of;
  };
  const idle = (rank, until) => {
    while (gap < gaps.count && gaps.rank[gap] === rank && gaps.start[gap] < until) {
      const end = Math.min(gaps.end[gap], until);
      put(Math.min(gaps.start[gap], until), IDLE, -1);
      const cause = gaps.cause[gap];
      if (cause === DEPENDENCY) {
        put(at + (end - at) * (1 - panel.imbalance[rank]), IDLE + DEPENDENCY, gap);
        put(end, IDLE + IMBALANCE, gap);
      } else put(end, IDLE + cause, gap);
      gap++;
    }
    put(until, IDLE, -1);
  };
  for (let r = 0; r < panel.ranks; r++) {
    pieces.first[r] = n;
    at = 0;
    for (let i = panel.first[r]; i < panel.first[r + 1]; i++) {
      idle(r, panel.start[i]);
      put(panel.end[i], panel.kind[i], i);
    }
    idle(r, panel.makespan_s);
    while (gap < gaps.count && gaps.rank[gap] === r) gap++;
  }
  pieces.first[panel.ranks] = n;
  return pieces;
}

/** Returns the most memory that each rank holds, in bytes. */
function peaksOf(panel) {
  const peaks = new Float64Array(panel.ranks);
  for (let r = 0; r < panel.ranks; r++) {
    for (let i = panel.memory.first[r]; i < panel.memory.first[r + 1]; i++) {
      peaks[r] = Math.max(peaks[r], panel.memory.level[i]);
    }
  }
  return peaks;
}

/** Returns the first place in `values[from..to)`, sorted, whose value is more than `wanted`. */
function above(values, wanted, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > wanted) to = middle;
    else from = middle + 1;
  }
  return from;
}

/** Returns the piece of a rank's row at a time, or -1 outside of the step. */
function pieceAt(panel, rank, time) {
  const { first, end } = panel.pieces;
  const i = above(end, time, first[rank], first[rank + 1]);
  return time >= 0 && i < first[rank + 1] ? i : -1;
}

/** Returns the number of the event that an action or transfer followed; -1: the step's start. */
function beforeOf(panel, event) {
  return event < panel.count ? panel.before[event] : panel.transfers.before[event - panel.count];
}

/** Returns the chain of events from the start of the step to one of them. */
function chainTo(panel, event) {
  const chain = [];
  const most = panel.count + panel.transfers.count;
  while (event >= 0 && chain.length <= most) {
    chain.push(event);
    event = beforeOf(panel, event);
  }
  return chain.reverse();
}

function lastAction(panel) {
  let last = -1;
  for (let i = 0; i < panel.count; i++) if (last < 0 || panel.end[i] > panel.end[last]) last = i;
  return last;
}

/** Returns when an action or transfer starts and ends. */
function spanOf(panel, event) {
  if (event < panel.count) return [panel.start[event], panel.end[event]];
  const t = event - panel.count;
  return [panel.transfers.start[t], panel.transfers.end[t]];
}
