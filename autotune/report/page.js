"use strict";
(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // Where nothing can hover, the buttons would lie over the legend for good.
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };

  // Read from the style sheet, so that each colour is written once.
  const template = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = {
      gridcolor: colour("line"),
      linecolor: colour("quiet"),
      zerolinecolor: colour("quiet"),
      automargin: true,
      title: { standoff: 10 },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("text"), family: "system-ui, Segoe UI, Roboto, Arial, sans-serif" },
        colorway: ["#2f86d6", "#e08a1e", "#2a9d72", "#c9574f", "#9673c9", "#8b8f3a", "#7d8794"],
        hoverlabel: { align: "left" },
        annotationdefaults: { bgcolor: colour("ground"), borderpad: 0 },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("text") },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
        margin: { l: 56, r: 20, t: 36, b: 48 },
        xaxis: axis,
        yaxis: axis,
      },
    };
  };
  const draw = (plot) => {
    const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
    return Plotly.react(plot, data, { ...layout, template: template() }, config);
  };
  const drawAll = () => plots.forEach(draw);

  drawAll();
  dark.addEventListener("change", drawAll);

  // Paper is white and cannot be clicked.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = true; });
    drawAll();
  });
  addEventListener("afterprint", () => {
    folded.forEach((details) => { details.open = false; });
    drawAll();
  });
})();
