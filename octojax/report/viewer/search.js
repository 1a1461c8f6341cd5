// Which actions a text names: an action, a layer, a microbatch, a stage, a rank or a kind.

const ACTION = /^(\d+)([FBIWR])(\d+)$/i;
const NUMBERED = [
  [/^(?:m|mb|microbatch)=?(\d+)$/i, "microbatch"],
  [/^(?:s|stage)=?(\d+)$/i, "stage"],
  [/^(?:r|rank)=?(\d+)$/i, "rank"],
];

/** Returns a test `(panel, action) -> boolean` for one word, or null for none. */
function wordTest(word) {
  const action = ACTION.exec(word);
  if (action) {
    const name = `${+action[1]}${action[2].toUpperCase()}${+action[3]}`;
    return (panel, i) =>
      partText(panel, i, 0) === name ||
      (panel.kind[i] === OVERLAP && partText(panel, i, 1) === name);
  }
  for (const [form, what] of NUMBERED) {
    const match = form.exec(word);
    if (!match) continue;
    const number = +match[1];
    if (what === "rank") return (panel, i) => panel.rank[i] === number;
    const halves = what === "stage" ? "stages" : "microbatches";
    return (panel, i) => panel[halves][0][i] === number || panel[halves][1][i] === number;
  }
  if (/^\d+$/.test(word)) {
    return (panel, i) => panel.microbatches.some((numbers) => numbers[i] === +word);
  }
  const kind = KINDS.findIndex(
    (k) => k === word.toUpperCase() || KIND_NAMES[k] === word.toLowerCase(),
  );
  if (kind >= 0) {
    return (panel, i) => panel.kind[i] === kind || (panel.kind[i] === OVERLAP && kind < 2);
  }
  const text = word.toLowerCase();
  const stages = new Map(); // of each panel: whether its stages have a layer of this name
  return (panel, i) => {
    if (!stages.has(panel)) {
      stages.set(
        panel,
        panel.layers.map((layers) => layers.toLowerCase().includes(text)),
      );
    }
    return panel.stages.some((numbers) => stages.get(panel)[numbers[i]]);
  };
}

/** Returns `{panel, event}` of every action that all words of a text name, in order of time. */
function search(panels, text) {
  const words = text
    .trim()
    .replace(/\b(microbatch|stage|rank|mb)\s+(?=\d)/gi, "$1=")
    .split(/\s+/);
  const tests = words.filter(Boolean).map(wordTest);
  if (!tests.length) return null;
  const matches = [];
  for (const panel of panels) {
    for (let i = 0; i < panel.count; i++) {
      if (tests.every((test) => test(panel, i))) matches.push({ panel, event: i });
    }
  }
  return matches.sort((a, b) => a.panel.start[a.event] - b.panel.start[b.event]);
}
