// The legend, and the start.

/** Shows every kind and cause that there is, as it is drawn. */
function drawLegend(element, { panels, palette }) {
  const codes = new Set();
  for (const panel of panels) {
    for (const kind of panel.kinds) codes.add(KINDS.indexOf(kind));
    const { code, first } = panel.pieces;
    for (let i = 0; i < first[panel.ranks]; i++) if (code[i] >= IDLE) codes.add(code[i]);
  }
  element.replaceChildren();
  for (const code of [...codes].sort((a, b) => a - b)) {
    const swatch = node("canvas", { width: 22, height: 14, ariaHidden: "true" });
    const surface = new Surface(22, 14);
    surface.fill(0, 22, 0, 14, palette.looks[code][0]);
    swatch.getContext("2d").putImageData(surface.image, 0, 0);
    const name =
      code < OVERLAP
        ? `${KINDS[code]} ${KIND_NAMES[KINDS[code]]}`
        : `bubble: ${CAUSES[code - IDLE]}`;
    element.append(
      node("span", { title: code < OVERLAP ? "" : CAUSE_NAMES[CAUSES[code - IDLE]] }, swatch, name),
    );
  }
  element.append(
    node(
      "span",
      { className: "soft" },
      "3F7: stage 3, forward, microbatch 7; paler: a rank's later stages",
    ),
  );
}

async function start() {
  const message = document.getElementById("loading");
  if (typeof DecompressionStream === "undefined") {
    message.textContent =
      "This browser is too old for this page: it lacks DecompressionStream (2023).";
    return;
  }
  try {
    const data = JSON.parse(document.getElementById("data").textContent);
    const panels = await Promise.all(data.map(readPanel));
    message.remove();
    document.getElementById("middle").hidden = false;
    window.octopipe = new Viewer(panels); // for tests, and for the curious
  } catch (error) {
    message.textContent = `This page is damaged: ${error.message}`;
    throw error;
  }
}

start();
