// The text beside the picture: what is pinned, and what is selected. All of it is set as text, so
// that nothing in a name can become markup.

function node(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function facts(rows) {
  const list = node("dl");
  for (const [name, value] of rows) list.append(node("dt", {}, name), node("dd", {}, value));
  return list;
}

const CHAIN_SHOWN = 60; // events of a chain that are listed

class Details {
  /** `go(panel, event)` pins an event and brings it into view. */
  constructor(element, go) {
    this.element = element;
    this.go = go;
  }

  draw(state) {
    const { pin, selection, panels } = state;
    this.element.replaceChildren();
    this.element.hidden = !pin && !selection;
    if (selection) this.element.append(...this.selected(panels, selection));
    if (pin)
      this.element.append(...(pin.event >= 0 ? this.event(state, pin) : this.idle(state, pin)));
  }

  link(panel, event) {
    if (event < 0) return nameOf(panel, event);
    return node(
      "button",
      { className: "link", onclick: () => this.go(panel, event) },
      nameOf(panel, event),
    );
  }

  selected(panels, selection) {
    const [from, to] = selection;
    const unit = panels[0]?.unit ?? "s";
    const head = node(
      "tr",
      {},
      node("th"),
      ...panels.map((p) => node("th", {}, panels.length > 1 ? p.letter : "all ranks")),
    );
    const rows = selectionTable(panels, selection).map(([name, ...cells]) =>
      node(
        "tr",
        {},
        node("th", {}, name),
        ...cells.map(([time, share]) =>
          node("td", {}, time, node("div", { className: "soft" }, share)),
        ),
      ),
    );
    return [
      node("h2", {}, `Selected: ${timeText(to - from, unit)}`),
      node("p", { className: "soft" }, `${timeText(from, unit)} to ${timeText(to, unit)}`),
      node("table", { id: "sums" }, head, ...rows),
    ];
  }

  event(state, { panel, event }) {
    const transfer = event >= panel.count;
    const parts = [node("h2", {}, nameOf(panel, event))];
    if (state.panels.length > 1) parts.push(node("p", { className: "soft" }, panel.heading));
    parts.push(transfer ? this.transfer(panel, event - panel.count) : this.action(panel, event));
    parts.push(...this.chain(state, panel, event));
    return parts;
  }

  action(panel, i) {
    const unit = panel.unit;
    const kind = panel.kind[i];
    const rows = [
      ["kind", kind === OVERLAP ? "forward and backward as one" : KIND_NAMES[KINDS[kind]]],
      ["rank", String(panel.rank[i])],
      ["microbatch", String(panel.microbatches[0][i])],
      ["stage", String(panel.stages[0][i])],
      ...layersOf(panel, i).map((text) => ["layers", text]),
      ["time", `${timeText(panel.start[i], unit)} to ${timeText(panel.end[i], unit)}`],
      ["takes", timeText(panel.end[i] - panel.start[i], unit)],
    ];
    if (!panel.trouble) rows.push(["slack", slackText(panel, panel.slack[i])]);
    const { size, source, target } = panel.transfers;
    for (const t of transfersOf(panel, i, "taker")) {
      const text = `${bytesText(panel.sizes[size[t]])} from rank ${source[t]}: `;
      rows.push(["received", node("span", {}, text, this.link(panel, panel.count + t))]);
    }
    for (const t of transfersOf(panel, i, "maker")) {
      const text = `${bytesText(panel.sizes[size[t]])} to rank ${target[t]}: `;
      rows.push(["sent", node("span", {}, text, this.link(panel, panel.count + t))]);
    }
    const waits = waitsOf(panel, i);
    for (const gap of waits) rows.push(["waited", this.wait(panel, gap)]);
    if (!waits.length) rows.push(["waited", "not at all: its rank was busy until then"]);
    return facts(rows);
  }

  transfer(panel, t) {
    const { start, end, source, target, size, maker, taker, slack } = panel.transfers;
    const rows = [
      ["transfer", `rank ${source[t]} to rank ${target[t]}`],
      ["size", bytesText(panel.sizes[size[t]])],
      ["time", `${timeText(start[t], panel.unit)} to ${timeText(end[t], panel.unit)}`],
      ["takes", timeText(end[t] - start[t], panel.unit)],
      ["made by", this.link(panel, maker[t])],
      ["for", taker[t] < 0 ? "nobody" : this.link(panel, taker[t])],
    ];
    if (!panel.trouble) rows.push(["slack", slackText(panel, slack[t])]);
    return facts(rows);
  }

  wait(panel, gap) {
    const on = panel.gaps.on[gap];
    const text = node("span", {}, waitText(panel, gap));
    if (on >= 0)
      text.append(
        " ",
        node("button", { className: "link", onclick: () => this.go(panel, on) }, "show"),
      );
    return text;
  }

  idle(state, { panel, piece }) {
    const { of } = panel.pieces;
    const gap = of[piece];
    const [title, ...lines] = idleLines(panel, piece);
    const parts = [node("h2", {}, title), ...lines.slice(0, 2).map((line) => node("p", {}, line))];
    parts.push(node("p", {}, `rank ${rankOfPiece(panel, piece)}`));
    if (gap < 0) return parts;
    parts.push(node("p", {}, "waited ", this.wait(panel, gap)));
    if (panel.gaps.on[gap] >= 0) parts.push(...this.chain(state, panel, panel.gaps.on[gap]));
    return parts;
  }

  /** The chain back to the start of the step: what it is made of, and its latest events. */
  chain(state, panel, event) {
    if (panel.trouble) return [node("p", { className: "soft" }, panel.trouble)];
    const chain = chainTo(panel, event);
    let [computing, moving] = [0, 0];
    for (const e of chain) {
      const [from, to] = spanOf(panel, e);
      if (e < panel.count) computing += to - from;
      else moving += to - from;
    }
    const end = spanOf(panel, event)[1];
    const share = (value) => `${timeText(value, panel.unit)} (${shareText(end ? value / end : 0)})`;
    const items = chain
      .slice(-CHAIN_SHOWN)
      .reverse()
      .map((e) => {
        const where =
          e < panel.count
            ? `rank ${panel.rank[e]}`
            : `from rank ${panel.transfers.source[e - panel.count]}`;
        const [from, to] = spanOf(panel, e);
        return node("li", {}, this.link(panel, e), ` ${where}, ${timeText(to - from, panel.unit)}`);
      });
    const more = chain.length - items.length;
    return [
      node("h3", {}, "Back to the start of the step"),
      node(
        "p",
        {},
        `${chain.length} events: ${share(computing)} of computing, ${share(moving)} of transfers`,
      ),
      node("ol", { id: "chain" }, ...items),
      ...(more ? [node("p", { className: "soft" }, `and ${more} earlier`)] : []),
    ];
  }
}

function slackText(panel, slack) {
  if (slack === 0) return "none: it is on a critical path";
  return `${timeText(slack, panel.unit)}: so much later it could end without a longer step`;
}
