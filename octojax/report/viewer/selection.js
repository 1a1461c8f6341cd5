// What all ranks of every panel do in a selected span of time: sums per kind and cause.

/** Returns seconds by code, of all ranks of a panel together, from `from` to `to`. */
function sumsOf(panel, from, to) {
  const sums = new Float64Array(CODES);
  const { first, start, end, code } = panel.pieces;
  for (let rank = 0; rank < panel.ranks; rank++) {
    const last = first[rank + 1];
    for (let i = above(end, from, first[rank], last); i < last && start[i] < to; i++) {
      sums[code[i]] += Math.min(end[i], to) - Math.max(start[i], from);
    }
  }
  sums[0] += sums[OVERLAP] / 2;
  sums[1] += sums[OVERLAP] / 2;
  sums[OVERLAP] = 0;
  return sums;
}

/** Returns rows `[name, [time, share] per panel]` of a table of the selected time. */
function selectionTable(panels, [from, to]) {
  const sums = panels.map((panel) => sumsOf(panel, from, to));
  const names = [
    ...KINDS.map((kind) => `${kind} ${KIND_NAMES[kind]}`),
    "",
    ...CAUSES.map((cause) => `bubble: ${cause}`),
  ];
  const rows = [];
  for (let code = 0; code < CODES; code++) {
    if (sums.every((of) => !(of[code] > 0))) continue;
    const cells = panels.map((panel, i) => {
      const whole = (to - from) * panel.ranks;
      return [timeText(sums[i][code], panel.unit), shareText(sums[i][code] / whole)];
    });
    rows.push([names[code], ...cells]);
  }
  return rows;
}
