// The state of the viewer in the page's address, so that a link shows what its sender saw.

/** Returns the part of the address after `#`. */
function addressOf(state) {
  const { view, pin, query, selection } = state;
  const parts = new URLSearchParams();
  const number = (value) => String(+value.toPrecision(9));
  if (view.from > 0 || view.to < view.whole * (1 - 1e-9)) {
    parts.set("t", `${number(view.from)},${number(view.to)}`);
  }
  if (view.scroll) parts.set("y", number(view.scroll));
  if (pin) {
    parts.set("pin", `${pin.panel.number},${pin.event >= 0 ? pin.event : `bubble ${pin.piece}`}`);
  }
  if (query) parts.set("q", query);
  if (selection) parts.set("select", selection.map(number).join());
  if (state.critical) parts.set("critical", "1");
  if (state.grouped) parts.set("grouped", "1");
  if (state.memory !== state.memoryByDefault) parts.set("memory", state.memory ? "1" : "0");
  if (state.theme !== "auto") parts.set("theme", state.theme);
  return parts.toString();
}

function range(text, most) {
  const numbers = (text ?? "").split(",").map(Number);
  const good =
    text && numbers.length === 2 && numbers.every(Number.isFinite) && numbers[0] < numbers[1];
  return good ? numbers.map((n) => Math.max(0, Math.min(most, n))) : null;
}

/** Puts what an address says into the state; what it says wrongly is passed over. */
function readAddress(state, hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const { view, panels } = state;
  state.critical = parts.get("critical") === "1";
  state.grouped = parts.get("grouped") === "1";
  state.memory = parts.has("memory") ? parts.get("memory") === "1" : state.memoryByDefault;
  state.theme = ["light", "dark"].includes(parts.get("theme")) ? parts.get("theme") : "auto";
  state.selection = range(parts.get("select"), view.whole);
  state.query = parts.get("q") ?? "";
  view.show(...(range(parts.get("t"), view.whole) ?? [0, view.whole]));
  view.scroll = Math.max(0, Number(parts.get("y")) || 0);
  const pin = /^(\d+),(bubble )?(\d+)$/.exec(parts.get("pin") ?? "");
  state.pin = null;
  if (!pin || !panels[+pin[1]]) return;
  const [panel, number] = [panels[+pin[1]], +pin[3]];
  if (pin[2] && number < panel.pieces.first[panel.ranks] && panel.pieces.code[number] >= IDLE) {
    state.pin = { panel, event: -1, piece: number };
  } else if (!pin[2] && number < panel.count + panel.transfers.count) {
    state.pin = { panel, event: number };
  }
}
