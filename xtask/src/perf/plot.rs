//! The report as charts: throughput, latency over load, memory over idle connections and agents, relay engines.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::results::{Cell, Results};
use super::rows::{Better, Row};
use super::scenario::Dialect;

const SIZE: (u32, u32) = (960, 540);
const FONT: (&str, u32) = ("sans-serif", 16);
const TITLE: (&str, u32) = ("sans-serif", 22);
/// Height of the area above the plot, for title and note.
const HEADER: u32 = 66;
/// Width of the legend, which is beside the plot so that it covers no line.
const LEGEND: u32 = 250;
/// Height of one entry of the legend.
const LEGEND_ROW: i32 = 24;
/// Share of a group's width that its bars fill.
const GROUP_SHARE: f64 = 0.8;
/// Length of a dash and of a gap, in pixels.
const DASH: (i32, i32) = (9, 5);

/// Kind of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Bars, grouped by the bulk measurements of a metric.
    Bars,
    /// Lines over the number in the rows' names: `paced_500_p50_us` is at 500.
    Lines,
    /// Lines on a logarithmic scale of microseconds: a peer that takes seconds does not flatten peers that take some hundred
    /// microseconds.
    LogLines,
}

/// Definition of a chart.
struct Spec {
    file: &'static str,
    title: &'static str,
    kind: Kind,
    /// First word of the rows' names, and their metric.
    rows: (&'static str, &'static str),
    /// Labels of the x axis, and of the y axis with its unit.
    axes: (&'static str, &'static str),
}

const fn bars(
    file: &'static str,
    title: &'static str,
    metric: &'static str,
    unit: &'static str,
) -> Spec {
    let axes = ("download (down) or upload (up) x streams", unit);
    let (kind, rows) = (Kind::Bars, ("", metric));
    Spec {
        file,
        title,
        kind,
        rows,
        axes,
    }
}

const fn lines(
    file: &'static str,
    title: &'static str,
    rows: (&'static str, &'static str),
    axes: (&'static str, &'static str),
) -> Spec {
    let kind = Kind::Lines;
    Spec {
        file,
        title,
        kind,
        rows,
        axes,
    }
}

const fn latency(file: &'static str, title: &'static str, metric: &'static str) -> Spec {
    let axes = (
        "echoes asked for in a second",
        "time since it was due, logarithmic",
    );
    let (kind, rows) = (Kind::LogLines, ("paced", metric));
    Spec {
        file,
        title,
        kind,
        rows,
        axes,
    }
}

/// Charts of every dialect.
const CHARTS: [Spec; 6] = [
    bars("throughput", "Throughput", "gbit_s", "Gbit/s"),
    latency("latency-p50", "Latency of an echo, median", "p50_us"),
    latency(
        "latency-p99",
        "Latency of an echo, 99th percentile",
        "p99_us",
    ),
    lines(
        "memory",
        "Memory with idle connections",
        ("idle", "resident_mib"),
        ("idle connections", "MiB resident, all processes"),
    ),
    lines(
        "agents",
        "Memory of a server with idle agents",
        ("agents", "server_mib"),
        ("agents", "MiB resident, server"),
    ),
    lines(
        "agents-cpu",
        "CPU time of a server with idle agents",
        ("agents", "idle_cpu_percent"),
        ("agents", "% of a core, server"),
    ),
];

/// Charts of bare relays.
const ENGINE_CHARTS: [Spec; 2] = [
    bars("engines", "Throughput of a relay alone", "gbit_s", "Gbit/s"),
    bars(
        "engines-cpu",
        "CPU time of a relay alone",
        "cpu_s_per_gib",
        "CPU s/GiB",
    ),
];

/// The median of all rounds, with their minimum and maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    /// A number from the row's name, or the number of a group.
    x: f64,
    y: f64,
    least: f64,
    most: f64,
}

/// A chart with its values.
struct Chart<'a> {
    file: String,
    title: String,
    note: String,
    spec: &'static Spec,
    /// Names of the bar groups.
    groups: Vec<String>,
    series: Vec<(&'a str, Vec<Point>)>,
    /// Peers without a value in this chart, and why.
    absent: Vec<String>,
}

/// Draws all charts that the run has numbers for, into `folder`. Returns the written files.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn draw(results: &Results, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let styles = styles(results);
    let mut written = Vec::new();
    for chart in charts(results) {
        let path = folder.join(format!("{}.svg", chart.file));
        let svg = chart
            .to_svg(&styles)
            .map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
        fs::write(&path, svg).with_context(|| format!("writing {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

fn charts(results: &Results) -> Vec<Chart<'_>> {
    let names = || results.peers.iter().map(|peer| peer.name.as_str());
    let (engines, stacks): (Vec<&str>, Vec<&str>) =
        names().partition(|peer| peer.starts_with("relay-"));
    let mut all = Vec::new();
    for dialect in results.dialects() {
        let client = match dialect {
            Dialect::Grpc => "gRPC client of our own",
            Dialect::GrpcGo => "gRPC client in Go",
            Dialect::HttpConnect => "HTTP CONNECT client",
            Dialect::Tcp => "plain TCP client",
        };
        for spec in &CHARTS {
            let file = format!("{}-{}", spec.file, dialect.name());
            let title = format!("{}, {client}", spec.title);
            all.extend(chart(results, spec, dialect, &stacks, file, title));
        }
    }
    if let (Some(dialect), false) = (results.dialects().first(), engines.is_empty()) {
        let direct = names().filter(|peer| *peer == "direct");
        let peers: Vec<&str> = direct.chain(engines).collect();
        for spec in &ENGINE_CHARTS {
            let (file, title) = (spec.file.to_owned(), spec.title.to_owned());
            all.extend(chart(results, spec, *dialect, &peers, file, title));
        }
    }
    all
}

/// A chart of some peers; `None` if none of them has a value.
fn chart<'a>(
    results: &Results,
    spec: &'static Spec,
    dialect: Dialect,
    peers: &[&'a str],
    file: String,
    title: String,
) -> Option<Chart<'a>> {
    let has_value = |row: &Row| {
        peers
            .iter()
            .any(|peer| results.value(peer, dialect, &row.key).is_some())
    };
    let mut rows = results.rows(dialect);
    rows.retain(|row| spec.part(row).is_some() && has_value(row));
    let parts = rows.iter().filter_map(|row| spec.part(row));
    let positions: Vec<f64> = match spec.kind {
        Kind::Bars => (0_u32..).map(f64::from).take(rows.len()).collect(),
        Kind::Lines | Kind::LogLines => {
            parts.clone().filter_map(|part| part.parse().ok()).collect()
        }
    };
    let series = |peer: &&'a str| {
        let point = |(row, x): (&Row, &f64)| {
            let y = results.value(peer, dialect, &row.key)?;
            let rounds = results.values(peer, dialect, &row.key);
            Some(Point {
                x: *x,
                y,
                least: rounds.iter().copied().fold(y, f64::min),
                most: rounds.iter().copied().fold(y, f64::max),
            })
        };
        let points: Vec<Point> = rows.iter().zip(&positions).filter_map(point).collect();
        (!points.is_empty()).then_some((*peer, points))
    };
    let first = rows.first()?;
    let absent = |peer: &&str| match results.cell(peer, dialect, first) {
        Cell::Failed => Some(format!("{peer}: failed")),
        Cell::Missing => Some(format!("{peer}: missing")),
        Cell::Value(_) | Cell::Nothing => None,
    };
    let rounds = match results.rounds() {
        1 => "One round".to_owned(),
        more => format!("Medians of {more} rounds"),
    };
    let better = match first.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
    };
    let extremes = match spec.kind {
        Kind::Bars => "; thin lines from the least to the most",
        Kind::Lines | Kind::LogLines => "",
    };
    Some(Chart {
        file,
        title,
        note: format!("{rounds}; {better} is better{extremes}."),
        spec,
        groups: parts.map(|part| part.replace('_', " x")).collect(),
        series: peers.iter().filter_map(series).collect(),
        absent: peers.iter().filter_map(absent).collect(),
    })
}

impl Spec {
    /// The part of a row's name that gives its x position: `down_8`, or the number in `paced_500_p50_us`.
    fn part<'a>(&self, row: &'a Row) -> Option<&'a str> {
        let (kind, metric) = self.rows;
        let rest = row.key.strip_suffix(metric)?.strip_suffix('_')?;
        if self.kind == Kind::Bars {
            // Excludes `mixed_down` and `down_8_machine`.
            let is_bulk = row.measurement == "bulk" && rest.matches('_').count() == 1;
            return is_bulk.then_some(rest);
        }
        let number = rest.strip_prefix(kind)?.strip_prefix('_')?;
        number.parse::<f64>().is_ok().then_some(number)
    }
}

/// Style of a peer's lines and bars: the same in all charts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Style {
    color: RGBColor,
    stroke: Stroke,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stroke {
    /// For `adit`, the subject of the report.
    Thick,
    Solid,
    Dashed,
}

// The palette of Okabe and Ito, which colour-blind readers can distinguish; grey replaces its yellow, which is faint on white.
const GREY: RGBColor = RGBColor(128, 128, 128);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const SKY: RGBColor = RGBColor(86, 180, 233);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const PURPLE: RGBColor = RGBColor(204, 121, 167);

/// Styles of known peers. Related peers share a colour; relays never share a chart with other peers.
const KNOWN: [(&str, RGBColor, Stroke); 20] = [
    ("direct", GREY, Stroke::Solid),
    ("upstream", VERMILION, Stroke::Solid),
    ("adit", BLUE, Stroke::Thick),
    ("adit-link", BLUE, Stroke::Dashed),
    ("adit-plaintext", SKY, Stroke::Solid),
    ("adit-redirect", SKY, Stroke::Dashed),
    ("adit-server", GREEN, Stroke::Solid),
    ("adit-agent", PURPLE, Stroke::Solid),
    ("haproxy", ORANGE, Stroke::Solid),
    ("haproxy-plaintext", ORANGE, Stroke::Dashed),
    ("rathole", BLACK, Stroke::Solid),
    ("openvpn", GREEN, Stroke::Dashed),
    ("wireguard", PURPLE, Stroke::Dashed),
    ("relay-epoll-copy", BLUE, Stroke::Dashed),
    ("relay-epoll-splice", BLUE, Stroke::Solid),
    ("relay-io-uring-copy", GREEN, Stroke::Dashed),
    ("relay-io-uring-splice", GREEN, Stroke::Solid),
    ("relay-tokio", ORANGE, Stroke::Solid),
    ("relay-tokio-uring", ORANGE, Stroke::Dashed),
    ("relay-ring-splice", PURPLE, Stroke::Solid),
];

type Styles = BTreeMap<String, Style>;

/// Styles of all peers of a run. Unknown peers take styles that no known peer of the run has.
fn styles(results: &Results) -> Styles {
    let peers = || results.peers.iter().map(|peer| peer.name.as_str());
    let known = |peer: &str| {
        let (_, color, stroke) = *KNOWN.iter().find(|(name, ..)| *name == peer)?;
        Some(Style { color, stroke })
    };
    let mut spare = Vec::new();
    for stroke in [Stroke::Solid, Stroke::Dashed] {
        let colors = [VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY];
        spare.extend(colors.map(|color| Style { color, stroke }));
    }
    let (taken, free): (Vec<_>, Vec<_>) = spare
        .into_iter()
        .partition(|style| peers().any(|peer| known(peer) == Some(*style)));
    let spare = if free.is_empty() { taken } else { free };
    let mut spare = spare.into_iter().cycle();
    peers()
        .filter_map(|peer| Some((peer.to_owned(), known(peer).or_else(|| spare.next())?)))
        .collect()
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Chart<'_> {
    fn to_svg(&self, styles: &Styles) -> anyhow::Result<String> {
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, SIZE), styles)?;
        // Text for screen readers.
        let (head, body) = svg.split_once(">\n").context("the drawing is empty")?;
        let peers: Vec<&str> = self.series.iter().map(|(peer, _)| *peer).collect();
        let (across, up) = self.spec.axes;
        let text = format!(
            "{up} against {across}, of {}. {}",
            peers.join(", "),
            self.note
        );
        let (title, text) = (escaped(&self.title), escaped(&text));
        Ok(format!(
            "{head} role=\"img\">\n<title>{title}</title>\n<desc>{text}</desc>\n{body}"
        ))
    }

    fn draw(&self, backend: SVGBackend<'_>, styles: &Styles) -> Drawn {
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        root.draw_text(&self.title, &TITLE.into_text_style(&root), (14, 14))?;
        root.draw_text(&self.note, &FONT.into_text_style(&root), (14, 40))?;
        let (_, below) = root.split_vertically(HEADER);
        let (plot, legend) = below.split_horizontally(SIZE.0 - LEGEND);
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let (least, _) = extent(points().map(|point| point.least));
        let (_, most) = extent(points().map(|point| point.most));
        let (_, right) = extent(points().map(|point| point.x));
        match self.spec.kind {
            Kind::Bars => {
                let groups = -0.5..self.groups.len() as f64 - 0.5;
                self.draw_series(&plot, groups, 0.0..most * 1.05, styles)
            }
            Kind::Lines => self.draw_series(&plot, 0.0..right * 1.02, 0.0..most * 1.05, styles),
            Kind::LogLines => {
                let range = (least / 1.5..most * 1.5).log_scale();
                self.draw_series(&plot, 0.0..right * 1.02, range, styles)
            }
        }?;
        self.draw_legend(&legend, styles)?;
        root.present()
    }

    fn draw_series<Y>(&self, area: &Area<'_>, x: Range<f64>, y: Y, styles: &Styles) -> Drawn
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64> + Ranged<ValueType = f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .margin_top(6)
            .x_label_area_size(52)
            .y_label_area_size(88)
            .build_cartesian_2d(x, y)?;
        let group = |x: &f64| {
            let mut named = (0_u32..).map(f64::from).zip(&self.groups);
            let group = named.find(|(at, _)| (x - at).abs() < 1e-6);
            group.map(|(_, name)| name.clone()).unwrap_or_default()
        };
        let mut mesh = chart.configure_mesh();
        mesh.label_style(FONT)
            .axis_desc_style(FONT)
            .x_desc(self.spec.axes.0)
            .y_desc(self.spec.axes.1)
            .x_label_formatter(&plain)
            .y_label_formatter(&plain)
            .max_light_lines(1);
        match self.spec.kind {
            Kind::Lines => &mut mesh,
            Kind::LogLines => mesh.y_label_formatter(&duration),
            Kind::Bars => mesh
                .disable_x_mesh()
                .x_labels(self.groups.len())
                .x_label_formatter(&group),
        }
        .draw()?;
        let width = GROUP_SHARE / self.series.len().max(1) as f64;
        for (number, (peer, points)) in self.series.iter().enumerate() {
            let style = style_of(styles, peer);
            if self.spec.kind == Kind::Bars {
                let left = |point: &Point| point.x - GROUP_SHARE / 2.0 + width * number as f64;
                let corners = |point: &Point| {
                    let left = left(point);
                    [(left, 0.0), (left + width * 0.9, point.y)]
                };
                chart.draw_series(points.iter().flat_map(|point| {
                    let corners = corners(point);
                    [style.area(), style.color.stroke_width(1)]
                        .map(|style| Rectangle::new(corners, style))
                }))?;
                chart.draw_series(points.iter().map(|point| {
                    let middle = left(point) + width * 0.45;
                    PathElement::new([(middle, point.least), (middle, point.most)], BLACK)
                }))?;
                continue;
            }
            let line = points.iter().map(|point| (point.x, point.y));
            let (dash, pause) = DASH;
            if style.stroke == Stroke::Dashed {
                chart.draw_series(DashedLineSeries::new(
                    line.clone(),
                    dash,
                    pause,
                    style.line(),
                ))?;
            } else {
                chart.draw_series(LineSeries::new(line.clone(), style.line()))?;
            }
            chart.draw_series(line.map(|at| Circle::new(at, 4, style.marker())))?;
        }
        Ok(())
    }

    fn draw_legend(&self, area: &Area<'_>, styles: &Styles) -> Drawn {
        let text = FONT.into_text_style(area);
        let text = text.pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = LEGEND_ROW / 2;
        for (peer, _) in &self.series {
            let style = style_of(styles, peer);
            if self.spec.kind == Kind::Bars {
                let corners = [(14, y - 7), (50, y + 7)];
                area.draw(&Rectangle::new(corners, style.area()))?;
                area.draw(&Rectangle::new(corners, style.color))?;
            } else {
                let (ends, (dash, pause)) = ([(14, y), (50, y)], DASH);
                if style.stroke == Stroke::Dashed {
                    area.draw(&DashedPathElement::new(ends, dash, pause, style.line()))?;
                } else {
                    area.draw(&PathElement::new(ends, style.line()))?;
                }
                area.draw(&Circle::new((32, y), 4, style.marker()))?;
            }
            area.draw_text(peer, &text, (64, y))?;
            y += LEGEND_ROW;
        }
        for absent in &self.absent {
            area.draw_text(absent, &text, (64, y))?;
            y += LEGEND_ROW;
        }
        Ok(())
    }
}

impl Style {
    fn line(self) -> ShapeStyle {
        let width = if self.stroke == Stroke::Thick { 4 } else { 2 };
        self.color.stroke_width(width)
    }

    /// Hollow markers for dashed lines.
    fn marker(self) -> ShapeStyle {
        match self.stroke {
            Stroke::Thick | Stroke::Solid => self.color.filled(),
            Stroke::Dashed => self.color.stroke_width(2),
        }
    }

    fn area(self) -> ShapeStyle {
        match self.stroke {
            Stroke::Thick | Stroke::Solid => self.color.filled(),
            Stroke::Dashed => self.color.mix(0.25).filled(),
        }
    }
}

fn style_of(styles: &Styles, peer: &str) -> Style {
    styles.get(peer).copied().unwrap_or(Style {
        color: BLACK,
        stroke: Stroke::Dashed,
    })
}

/// The smallest and the largest value above zero; 1 and 1 if there is none, so that an axis has a length.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let above_zero = values.filter(|value| *value > 0.0);
    let (least, most) = above_zero.fold((f64::INFINITY, 0.0_f64), |(least, most), value| {
        (least.min(value), most.max(value))
    });
    if most > 0.0 {
        (least, most)
    } else {
        (1.0, 1.0)
    }
}

/// The number without the digits that binary fractions add.
fn plain(value: &f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The duration in the unit that keeps the number short.
fn duration(microseconds: &f64) -> String {
    match *microseconds {
        us if us < 1e3 => format!("{us} us"),
        us if us < 1e6 => format!("{} ms", us / 1e3),
        us => format!("{} s", us / 1e6),
    }
}

/// Escapes names of peers, which come from users' files.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::results::samples::{missing, results, sample};

    #[test]
    fn a_run_gets_a_chart_for_each_kind_with_values() {
        let mut results = results(&["direct", "adit & co", "relay-tokio"]);
        results
            .peers
            .push(missing("wireguard", "the kernel has none"));
        for (round, gbit) in [(1, 9.0), (2, 5.0), (3, 10.0)] {
            let values = sample(&[
                ("down_8_gbit_s", gbit),
                ("paced_500_p50_us", 100.0),
                ("paced_2000_p50_us", 4e6),
                ("idle_100_resident_mib", 10.0),
                ("agents_100_server_mib", 0.0),
            ]);
            results.add(("adit & co", Dialect::Grpc), round, "bulk", Ok(values));
        }
        let relay = sample(&[("down_8_gbit_s", 13.0), ("down_8_cpu_s_per_gib", 0.4)]);
        results.add(("relay-tokio", Dialect::Tcp), 1, "bulk", Ok(relay));
        let folder = tempfile::tempdir().unwrap();
        let written = draw(&results, folder.path()).unwrap();
        let names = written
            .iter()
            .map(|path| path.file_stem().unwrap().to_str().unwrap());
        assert_eq!(
            names.collect::<Vec<_>>(),
            [
                "throughput-grpc",
                "latency-p50-grpc",
                "memory-grpc",
                "agents-grpc",
                "engines",
                "engines-cpu"
            ]
        );
        let bars = fs::read_to_string(&written[0]).unwrap();
        for text in [
            "<title>Throughput, gRPC client of our own</title>",
            "of adit &amp; co. Medians of 3 rounds; higher is better",
            "down x8",
            "wireguard: missing",
        ] {
            assert!(bars.contains(text), "{text} in {bars}");
        }
        let lines = fs::read_to_string(&written[1]).unwrap();
        assert!(lines.contains("1 ms") && lines.contains("1 s"), "{lines}");
    }

    #[test]
    fn points_lie_at_the_named_rate_and_bars_span_all_rounds() {
        let mut results = results(&["adit"]);
        for (round, gbit) in [(1, 9.0), (2, 5.0), (3, 10.0)] {
            let values = sample(&[("down_8_gbit_s", gbit), ("paced_500_p50_us", 100.0)]);
            results.add(("adit", Dialect::Grpc), round, "bulk", Ok(values));
        }
        let points = |chart: &Chart<'_>| chart.series[0].1.clone();
        let charts_of = charts(&results);
        let bar = points(&charts_of[0])[0];
        assert_eq!(charts_of[0].groups, ["down x8"]);
        assert_eq!((bar.least, bar.y, bar.most), (5.0, 9.0, 10.0));
        let point = points(&charts_of[1])[0];
        assert_eq!((point.x, point.y), (500.0, 100.0));
        assert_eq!(charts(&Results::default()).len(), 0);
    }

    #[test]
    fn peers_of_one_chart_differ_in_colour_or_stroke() {
        let names = ["theirs", "adit", "upstream", "mine", "haproxy"];
        let styles: Vec<Style> = styles(&results(&names)).into_values().collect();
        for (at, style) in styles.iter().enumerate() {
            assert!(!styles[at + 1..].contains(style), "{style:?}");
        }
    }
}
