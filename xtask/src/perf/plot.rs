//! The report as charts: throughput, latency against load, memory against idle connections and agents, relay engines.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::results::{Cell, Results};
use super::rows::{Better, Row};
use super::scenario::Way;

const SIZE: (u32, u32) = (960, 540);
const FONT: (&str, u32) = ("sans-serif", 16);
const TITLE: (&str, u32) = ("sans-serif", 22);
/// Height above the plot: title and note.
const HEADER: u32 = 66;
/// Width of the legend, beside the plot so that it hides no line.
const LEGEND: u32 = 250;
/// Height of one entry of the legend.
const LEGEND_ROW: i32 = 24;
/// Share of a group's width that its bars take.
const GROUP_SHARE: f64 = 0.8;

/// Values of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// From zero, so that lengths can be compared.
    Linear,
    /// Microseconds by decades: a peer that takes seconds leaves room for those that take some hundred microseconds.
    Logarithmic,
}

/// A metric drawn against the number in the names of its rows.
struct LineChart {
    file: &'static str,
    title: &'static str,
    /// First word of the rows' names, and their metric.
    rows: (&'static str, &'static str),
    axes: (&'static str, &'static str),
    scale: Scale,
}

const LATENCY_AXES: (&str, &str) = (
    "echoes asked for in a second",
    "time since it was due, logarithmic",
);

const LINE_CHARTS: [LineChart; 5] = [
    LineChart {
        file: "latency-p50",
        title: "Latency of an echo, median",
        rows: ("paced", "p50_us"),
        axes: LATENCY_AXES,
        scale: Scale::Logarithmic,
    },
    LineChart {
        file: "latency-p99",
        title: "Latency of an echo, 99th percentile",
        rows: ("paced", "p99_us"),
        axes: LATENCY_AXES,
        scale: Scale::Logarithmic,
    },
    LineChart {
        file: "memory",
        title: "Memory with idle connections",
        rows: ("idle", "resident_mib"),
        axes: ("idle connections", "MiB resident, all processes"),
        scale: Scale::Linear,
    },
    LineChart {
        file: "agents",
        title: "Memory of a server with idle agents",
        rows: ("agents", "server_mib"),
        axes: ("agents", "MiB resident, server"),
        scale: Scale::Linear,
    },
    LineChart {
        file: "agents-cpu",
        title: "CPU time of a server with idle agents",
        rows: ("agents", "idle_cpu_percent"),
        axes: ("agents", "% of a core, server"),
        scale: Scale::Linear,
    },
];

/// File, title, metric and unit of the bar charts of relays alone.
const ENGINE_CHARTS: [(&str, &str, &str, &str); 2] = [
    ("engines", "Throughput of a relay alone", "gbit_s", "Gbit/s"),
    (
        "engines-cpu",
        "CPU time of a relay alone",
        "cpu_s_per_gib",
        "CPU s/GiB",
    ),
];

/// A chart with its data.
struct Chart<'a> {
    file: String,
    title: String,
    note: String,
    axes: (&'a str, &'a str),
    content: Content<'a>,
    /// Peers that have no value here, and why.
    absent: Vec<String>,
}

enum Content<'a> {
    Lines(Scale, Vec<(&'a str, Vec<(f64, f64)>)>),
    /// Names of the groups, and for each peer a bar or none in each group.
    Bars(Vec<String>, Vec<(&'a str, Vec<Option<Bar>>)>),
}

/// The median of all rounds, and their extremes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bar {
    value: f64,
    least: f64,
    most: f64,
}

/// Draws what the run has numbers for, into `folder`. Returns what was written.
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
    let is_engine = |peer: &str| peer.starts_with("relay-");
    let mut all = Vec::new();
    for way in results.ways() {
        let peers = names().filter(|peer| !is_engine(peer)).collect();
        let view = View {
            results,
            way,
            peers,
        };
        let (name, client) = (way.name(), client(way));
        let file = format!("throughput-{name}");
        all.extend(view.bars(file, format!("Throughput, {client}"), "gbit_s", "Gbit/s"));
        all.extend(LINE_CHARTS.iter().filter_map(|chart| view.lines(chart)));
    }
    if names().any(is_engine) {
        let view = View {
            results,
            way: results.ways().first().copied().unwrap_or(Way::Tcp),
            peers: names()
                .filter(|peer| is_engine(peer) || *peer == "direct")
                .collect(),
        };
        for (file, title, metric, unit) in ENGINE_CHARTS {
            all.extend(view.bars(file.to_owned(), title.to_owned(), metric, unit));
        }
    }
    all
}

fn client(way: Way) -> &'static str {
    match way {
        Way::Grpc => "gRPC client of our own",
        Way::GrpcGo => "gRPC client in Go",
        Way::HttpConnect => "HTTP CONNECT client",
        Way::Tcp => "plain TCP client",
    }
}

/// Some peers of a run in one dialect.
struct View<'a> {
    results: &'a Results,
    way: Way,
    peers: Vec<&'a str>,
}

impl<'a> View<'a> {
    /// A group of bars for each bulk measurement; `None` without any.
    fn bars(&self, file: String, title: String, metric: &str, unit: &'a str) -> Option<Chart<'a>> {
        let suffix = format!("_{metric}");
        // `down_8`, not `mixed_down` or `down_8_machine`.
        let name = |row: &Row| {
            let name = row.key.strip_suffix(&suffix)?;
            let is_bulk = row.measurement == "bulk" && name.matches('_').count() == 1;
            is_bulk.then(|| name.replace('_', " x"))
        };
        let has_value = |row: &Row| self.peers.iter().any(|peer| self.bar(peer, row).is_some());
        let mut rows = self.results.rows(self.way);
        rows.retain(|row| name(row).is_some() && has_value(row));
        let better = rows.first()?.better;
        let of_peer = |peer: &&'a str| {
            let bars: Vec<_> = rows.iter().map(|row| self.bar(peer, row)).collect();
            bars.iter().any(Option::is_some).then_some((*peer, bars))
        };
        Some(Chart {
            file,
            title,
            note: format!(
                "{}; thin lines from the least to the most.",
                self.note(better)
            ),
            axes: ("download (down) or upload (up) x streams", unit),
            content: Content::Bars(
                rows.iter().filter_map(name).collect(),
                self.peers.iter().filter_map(of_peer).collect(),
            ),
            absent: self.absent(&rows),
        })
    }

    fn bar(&self, peer: &str, row: &Row) -> Option<Bar> {
        let value = self.results.value(peer, self.way, &row.key)?;
        let rounds = self.results.values(peer, self.way, &row.key);
        Some(Bar {
            value,
            least: rounds.iter().copied().fold(value, f64::min),
            most: rounds.iter().copied().fold(value, f64::max),
        })
    }

    /// A metric against the number in the names of its rows, `paced_500_p50_us` at 500; `None` if no peer has it.
    fn lines(&self, chart: &LineChart) -> Option<Chart<'a>> {
        let (kind, metric) = chart.rows;
        let at = |row: &Row| -> Option<f64> {
            let rest = row.key.strip_prefix(kind)?.strip_prefix('_')?;
            let number = rest.strip_suffix(metric)?.strip_suffix('_')?;
            number.parse().ok()
        };
        let mut rows = self.results.rows(self.way);
        rows.retain(|row| at(row).is_some());
        let points = |peer: &str| -> Vec<(f64, f64)> {
            let value = |row: &Row| self.results.value(peer, self.way, &row.key);
            rows.iter()
                .filter_map(|row| at(row).zip(value(row)))
                .collect()
        };
        let mut lines: Vec<_> = self
            .peers
            .iter()
            .map(|peer| (*peer, points(peer)))
            .collect();
        lines.retain(|(_, points)| !points.is_empty());
        if lines.is_empty() {
            return None;
        }
        Some(Chart {
            file: format!("{}-{}", chart.file, self.way.name()),
            title: format!("{}, {}", chart.title, client(self.way)),
            note: format!("{}.", self.note(rows.first()?.better)),
            axes: chart.axes,
            content: Content::Lines(chart.scale, lines),
            absent: self.absent(&rows),
        })
    }

    fn note(&self, better: Better) -> String {
        let rounds = match self.results.rounds() {
            1 => "One round".to_owned(),
            more => format!("Medians of {more} rounds"),
        };
        match better {
            Better::Higher => format!("{rounds}; higher is better"),
            Better::Lower => format!("{rounds}; lower is better"),
        }
    }

    /// Peers whose measurement of these rows failed, or that are missing.
    fn absent(&self, rows: &[Row]) -> Vec<String> {
        let why = |peer: &&str| match self.results.cell(peer, self.way, rows.first()?) {
            Cell::Failed => Some(format!("{peer}: failed")),
            Cell::Missing => Some(format!("{peer}: missing")),
            Cell::Value(_) | Cell::Nothing => None,
        };
        self.peers.iter().filter_map(why).collect()
    }
}

/// How lines and bars of a peer are drawn: the same in all charts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Style {
    color: RGBColor,
    stroke: Stroke,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stroke {
    /// Of `adit`, which the report is about.
    Thick,
    Solid,
    Dashed,
}

// The palette of Okabe and Ito, which the colour-blind can tell apart, with grey in place of its yellow, which is faint on white.
const GREY: RGBColor = RGBColor(128, 128, 128);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const SKY: RGBColor = RGBColor(86, 180, 233);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const PURPLE: RGBColor = RGBColor(204, 121, 167);

/// Styles of known peers. Relatives share a colour; relays are never in one chart with the peers of a stack.
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

/// Styles of all peers of a run. Unknown peers take those that no known peer of the run has.
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
        // For screen readers.
        let (head, body) = svg.split_once(">\n").context("the drawing is empty")?;
        let (across, up) = self.axes;
        let text = format!(
            "{up} against {across}, of {}. {}",
            self.peers().join(", "),
            self.note
        );
        let (title, text) = (escaped(&self.title), escaped(&text));
        Ok(format!(
            "{head} role=\"img\">\n<title>{title}</title>\n<desc>{text}</desc>\n{body}"
        ))
    }

    fn peers(&self) -> Vec<&str> {
        match &self.content {
            Content::Lines(_, lines) => lines.iter().map(|(peer, _)| *peer).collect(),
            Content::Bars(_, bars) => bars.iter().map(|(peer, _)| *peer).collect(),
        }
    }

    fn draw(&self, backend: SVGBackend<'_>, styles: &Styles) -> Drawn {
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        root.draw_text(&self.title, &TITLE.into_text_style(&root), (14, 14))?;
        root.draw_text(&self.note, &FONT.into_text_style(&root), (14, 40))?;
        let (_, below) = root.split_vertically(HEADER);
        let (plot, legend) = below.split_horizontally(SIZE.0 - LEGEND);
        match &self.content {
            Content::Lines(scale, lines) => {
                let (least, most) =
                    extent(lines.iter().flat_map(|(_, points)| points).map(|(_, y)| *y));
                match scale {
                    Scale::Linear => self.draw_lines(&plot, lines, 0.0..most * 1.05, styles),
                    Scale::Logarithmic => {
                        let range = (least / 1.5..most * 1.5).log_scale();
                        self.draw_lines(&plot, lines, range, styles)
                    }
                }?;
            }
            Content::Bars(groups, bars) => self.draw_bars(&plot, groups, bars, styles)?,
        }
        self.draw_legend(&legend, styles)?;
        root.present()
    }

    fn draw_lines<Y>(
        &self,
        area: &Area<'_>,
        lines: &[(&str, Vec<(f64, f64)>)],
        y: Y,
        styles: &Styles,
    ) -> Drawn
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64> + Ranged<ValueType = f64>,
    {
        let (_, most) = extent(lines.iter().flat_map(|(_, points)| points).map(|(x, _)| *x));
        let mut chart = layout(area).build_cartesian_2d(0.0..most * 1.02, y)?;
        let format = match self.content {
            Content::Lines(Scale::Logarithmic, _) => duration,
            _ => plain as fn(&f64) -> String,
        };
        chart
            .configure_mesh()
            .label_style(FONT)
            .axis_desc_style(FONT)
            .x_desc(self.axes.0)
            .y_desc(self.axes.1)
            .x_label_formatter(&plain)
            .y_label_formatter(&format)
            .max_light_lines(1)
            .draw()?;
        for (peer, points) in lines {
            let style = style_of(styles, peer);
            let (line, marker) = (style.line(), style.marker());
            match style.stroke {
                Stroke::Thick | Stroke::Solid => {
                    chart.draw_series(LineSeries::new(points.iter().copied(), line))?;
                }
                Stroke::Dashed => {
                    let points = points.iter().copied();
                    chart.draw_series(DashedLineSeries::new(points, 9, 5, line))?;
                }
            }
            chart.draw_series(points.iter().map(|at| Circle::new(*at, 4, marker)))?;
        }
        Ok(())
    }

    fn draw_bars(
        &self,
        area: &Area<'_>,
        groups: &[String],
        bars: &[(&str, Vec<Option<Bar>>)],
        styles: &Styles,
    ) -> Drawn {
        let (_, most) = extent(
            bars.iter()
                .flat_map(|(_, bars)| bars)
                .flatten()
                .map(|bar| bar.most),
        );
        // Groups lie around 0, 1, 2 and so on.
        let name = |x: &f64| {
            let mut named = (0_u32..).map(f64::from).zip(groups);
            let group = named.find(|(at, _)| (x - at).abs() < 1e-6);
            group.map(|(_, name)| name.clone()).unwrap_or_default()
        };
        let x = -0.5..groups.len() as f64 - 0.5;
        let mut chart = layout(area).build_cartesian_2d(x, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .label_style(FONT)
            .axis_desc_style(FONT)
            .x_desc(self.axes.0)
            .y_desc(self.axes.1)
            .x_labels(groups.len())
            .y_label_formatter(&plain)
            .max_light_lines(1)
            .x_label_formatter(&name)
            .draw()?;
        let width = GROUP_SHARE / bars.len().max(1) as f64;
        for (number, (peer, bars)) in bars.iter().enumerate() {
            let style = style_of(styles, peer);
            for (group, bar) in bars.iter().enumerate() {
                let Some(bar) = bar else { continue };
                let left = group as f64 - GROUP_SHARE / 2.0 + width * number as f64;
                let corners = [(left, 0.0), (left + width * 0.9, bar.value)];
                chart.draw_series([
                    Rectangle::new(corners, style.area()),
                    Rectangle::new(corners, style.color.stroke_width(1)),
                ])?;
                let middle = left + width * 0.45;
                let rounds = [(middle, bar.least), (middle, bar.most)];
                chart.draw_series(LineSeries::new(rounds, &BLACK))?;
            }
        }
        Ok(())
    }

    fn draw_legend(&self, area: &Area<'_>, styles: &Styles) -> Drawn {
        let text = FONT.into_text_style(area);
        let text = text.pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = LEGEND_ROW / 2;
        for peer in self.peers() {
            let style = style_of(styles, peer);
            match &self.content {
                Content::Lines(..) => {
                    let ends = [(14, y), (50, y)];
                    match style.stroke {
                        Stroke::Thick | Stroke::Solid => {
                            area.draw(&PathElement::new(ends, style.line()))?;
                        }
                        Stroke::Dashed => {
                            area.draw(&DashedPathElement::new(ends, 9, 5, style.line()))?;
                        }
                    }
                    area.draw(&Circle::new((32, y), 4, style.marker()))?;
                }
                Content::Bars(..) => {
                    let corners = [(14, y - 7), (50, y + 7)];
                    area.draw(&Rectangle::new(corners, style.area()))?;
                    area.draw(&Rectangle::new(corners, style.color))?;
                }
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

    /// Dashed lines have hollow markers.
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

fn layout<'a, 'b>(area: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut layout = ChartBuilder::on(area);
    layout
        .margin(14)
        .margin_top(6)
        .x_label_area_size(52)
        .y_label_area_size(88);
    layout
}

fn style_of(styles: &Styles, peer: &str) -> Style {
    styles.get(peer).copied().unwrap_or(Style {
        color: BLACK,
        stroke: Stroke::Dashed,
    })
}

/// The least and the most; 1 and 1 without values above zero, so that an axis has a length.
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

/// Without the digits that binary fractions add.
fn plain(value: &f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// In the unit that keeps the number short.
fn duration(microseconds: &f64) -> String {
    match *microseconds {
        us if us < 1e3 => format!("{us} us"),
        us if us < 1e6 => format!("{} ms", us / 1e3),
        us => format!("{} s", us / 1e6),
    }
}

/// Names of peers come from files of users.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::results::samples::{missing, results, sample};

    #[test]
    fn a_run_has_a_chart_of_each_kind_it_has_numbers_for() {
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
            results.add(("adit & co", Way::Grpc), round, "bulk", Ok(values));
        }
        let relay = sample(&[("down_8_gbit_s", 13.0), ("down_8_cpu_s_per_gib", 0.4)]);
        results.add(("relay-tokio", Way::Tcp), 1, "bulk", Ok(relay));
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
    fn points_lie_at_the_number_in_the_name_and_bars_reach_over_all_rounds() {
        let mut results = results(&["adit"]);
        for (round, gbit) in [(1, 9.0), (2, 5.0), (3, 10.0)] {
            let values = sample(&[("down_8_gbit_s", gbit), ("paced_500_p50_us", 100.0)]);
            results.add(("adit", Way::Grpc), round, "bulk", Ok(values));
        }
        for chart in charts(&results) {
            match chart.content {
                Content::Lines(_, lines) => assert_eq!(lines, [("adit", vec![(500.0, 100.0)])]),
                Content::Bars(groups, bars) => {
                    assert_eq!(groups, ["down x8"]);
                    let bar = bars[0].1[0].unwrap();
                    assert_eq!((bar.least, bar.value, bar.most), (5.0, 9.0, 10.0));
                }
            }
        }
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
