//! The report as charts: throughput, latency over load, memory over idle connections and agents.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use adit_perf_plan::Dialect;
use anyhow::{Context as _, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use self::Kind::{Bars, Lines, LogLines};
use super::results::{Cell, Results};
use super::rows::Row;

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

/// Definition of a chart: kind, file, title, first word of the rows' names, and their metric.
struct Spec(Kind, &'static str, &'static str, &'static str, &'static str);

const CHARTS: [Spec; 6] = [
    Spec(Bars, "throughput", "Throughput", "", "gbit_s"),
    Spec(
        LogLines,
        "latency-p50",
        "Latency of an echo, median",
        "paced",
        "p50_us",
    ),
    Spec(
        LogLines,
        "latency-p99",
        "Latency of an echo, 99th percentile",
        "paced",
        "p99_us",
    ),
    Spec(
        Lines,
        "memory",
        "Memory with idle connections",
        "idle",
        "resident_mib",
    ),
    Spec(
        Lines,
        "agents",
        "Memory of a server with idle agents",
        "agents",
        "server_mib",
    ),
    Spec(
        Lines,
        "agents-cpu",
        "CPU time of a server with idle agents",
        "agents",
        IDLE_CPU,
    ),
];
const IDLE_CPU: &str = "idle_cpu_percent";

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
    series: Vec<(&'a str, Style, Vec<Point>)>,
    /// Peers without a value in this chart, and why.
    absent: Vec<String>,
}

/// Draws all charts that the run has numbers for, into `folder`. Returns the written files.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn draw(results: &Results, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    for chart in charts(results) {
        let path = folder.join(format!("{}.svg", chart.file));
        let svg = chart
            .to_svg()
            .map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
        fs::write(&path, svg).with_context(|| format!("writing {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

fn charts(results: &Results) -> Vec<Chart<'_>> {
    let all = results.dialects().into_iter().flat_map(|dialect| {
        let chart = move |spec| chart(results, spec, dialect);
        CHARTS.iter().filter_map(chart)
    });
    all.collect()
}

/// A chart of a dialect; `None` if no peer has a value.
fn chart<'a>(results: &'a Results, spec: &'static Spec, dialect: Dialect) -> Option<Chart<'a>> {
    let client = match dialect {
        Dialect::Grpc => "gRPC client of our own",
        Dialect::GrpcGo => "gRPC client in Go",
        Dialect::GrpcGoReused => "gRPC client in Go, one connection for all tunnels",
        Dialect::GrpcGoTls => "gRPC client in Go, a TLS connection for each dial",
        Dialect::HttpConnect => "HTTP CONNECT client",
        Dialect::Socks5 => "SOCKS5 client",
        Dialect::Tcp => "plain TCP client",
    };
    let peers = || results.peers.iter().map(|peer| peer.name.as_str());
    let has_value =
        |row: &Row| peers().any(|peer| results.value(peer, dialect, &row.key).is_some());
    let mut rows = results.rows(dialect);
    rows.retain(|row| spec.part(row).is_some() && has_value(row));
    let first = rows.first()?;
    let parts = || rows.iter().filter_map(|row| spec.part(row));
    // A number of a name; groups are counted.
    let position = |(at, part): (u32, &str)| part.parse().unwrap_or_else(|_name| f64::from(at));
    let positions: Vec<f64> = (0..).zip(parts()).map(position).collect();
    let series = |(number, peer): (usize, &'a str)| {
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
        (!points.is_empty()).then_some((peer, style(number, peer), points))
    };
    let absent = |peer| match results.cell(peer, dialect, first) {
        Cell::Failed => Some(format!("{peer}: failed")),
        Cell::Missing => Some(format!("{peer}: missing")),
        Cell::Value(_) | Cell::Nothing => None,
    };
    let rounds = match results.rounds() {
        1 => "One round".to_owned(),
        more => format!("Medians of {more} rounds"),
    };
    let better = first.better.name();
    let extremes = match spec.0 {
        Bars => "; thin lines from the least to the most",
        Lines | LogLines => "",
    };
    Some(Chart {
        file: format!("{}-{}", spec.1, dialect.name()),
        title: format!("{}, {client}", spec.2),
        note: format!("{rounds}; {better} is better{extremes}."),
        spec,
        groups: parts().map(|part| part.replace('_', " x")).collect(),
        series: peers().enumerate().filter_map(series).collect(),
        absent: peers().filter_map(absent).collect(),
    })
}

impl Spec {
    /// The part of a row's name that gives its x position: `down_8`, or the number in `paced_500_p50_us`.
    fn part<'a>(&self, row: &'a Row) -> Option<&'a str> {
        let rest = row.key.strip_suffix(self.4)?.strip_suffix('_')?;
        if self.0 == Bars {
            return (row.measurement == "bulk").then_some(rest);
        }
        let number = rest.strip_prefix(self.3)?.strip_prefix('_')?;
        number.parse::<f64>().is_ok().then_some(number)
    }

    /// Labels of the x axis, and of the y axis with its unit.
    fn axes(&self) -> (&'static str, &'static str) {
        match self.4 {
            "gbit_s" => ("download (down) or upload (up) x streams", "Gbit/s"),
            "resident_mib" => ("idle connections", "MiB resident, all processes"),
            "server_mib" => ("agents", "MiB resident, server"),
            IDLE_CPU => ("agents", "% of a core, server"),
            _ => (
                "echoes asked for in a second",
                "time since it was due, logarithmic",
            ),
        }
    }
}

/// Style of a peer's lines and bars: the same in all charts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Style {
    color: RGBColor,
    width: u32,
    is_dashed: bool,
}

/// The subject of the report.
const ADIT: Style = Style {
    color: RGBColor(0, 114, 178),
    width: 4,
    is_dashed: false,
};

/// The other colours of the palette of Okabe and Ito, which colour-blind readers can distinguish; grey replaces its yellow, which
/// is faint on white.
const COLORS: [RGBColor; 7] = [
    RGBColor(128, 128, 128),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    BLACK,
];

/// Style of the peer with this number in the report.
fn style(number: usize, peer: &str) -> Style {
    if peer == "adit" {
        return ADIT;
    }
    Style {
        color: COLORS[number % COLORS.len()],
        width: 2,
        is_dashed: number / COLORS.len() % 2 == 1,
    }
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Chart<'_> {
    fn to_svg(&self) -> anyhow::Result<String> {
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, SIZE))?;
        // Text for screen readers.
        let (head, body) = svg.split_once(">\n").context("the drawing is empty")?;
        let peers: Vec<&str> = self.series.iter().map(|(peer, ..)| *peer).collect();
        let ((across, up), peers) = (self.spec.axes(), peers.join(", "));
        let text = escaped(&format!("{up} against {across}, of {peers}. {}", self.note));
        let title = escaped(&self.title);
        Ok(format!(
            "{head} role=\"img\">\n<title>{title}</title>\n<desc>{text}</desc>\n{body}"
        ))
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Drawn {
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        root.draw_text(&self.title, &TITLE.into_text_style(&root), (14, 14))?;
        root.draw_text(&self.note, &FONT.into_text_style(&root), (14, 40))?;
        let (_, below) = root.split_vertically(HEADER);
        let (plot, legend) = below.split_horizontally(SIZE.0 - LEGEND);
        let points = || self.series.iter().flat_map(|(_, _, points)| points);
        let (least, _) = extent(points().map(|point| point.least));
        let (_, most) = extent(points().map(|point| point.most));
        let (_, right) = extent(points().map(|point| point.x));
        match self.spec.0 {
            Bars => {
                let groups = -0.5..self.groups.len() as f64 - 0.5;
                self.draw_series(&plot, groups, 0.0..most * 1.05)
            }
            Lines => self.draw_series(&plot, 0.0..right * 1.02, 0.0..most * 1.05),
            LogLines => {
                let range = (least / 1.5..most * 1.5).log_scale();
                self.draw_series(&plot, 0.0..right * 1.02, range)
            }
        }?;
        self.draw_legend(&legend)?;
        root.present()
    }

    fn draw_series<Y>(&self, area: &Area<'_>, x: Range<f64>, y: Y) -> Drawn
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
            .x_desc(self.spec.axes().0)
            .y_desc(self.spec.axes().1)
            .x_label_formatter(&plain)
            .y_label_formatter(&plain)
            .max_light_lines(1);
        match self.spec.0 {
            Lines => &mut mesh,
            LogLines => mesh.y_label_formatter(&duration),
            Bars => mesh
                .disable_x_mesh()
                .x_labels(self.groups.len())
                .x_label_formatter(&group),
        }
        .draw()?;
        let width = GROUP_SHARE / self.series.len().max(1) as f64;
        for (number, (_, style, points)) in self.series.iter().enumerate() {
            if self.spec.0 == Bars {
                for point in points {
                    let left = point.x - GROUP_SHARE / 2.0 + width * number as f64;
                    let corners = [(left, 0.0), (left + width * 0.9, point.y)];
                    chart.draw_series(
                        [style.fill(), style.color.stroke_width(1)]
                            .map(|style| Rectangle::new(corners, style)),
                    )?;
                    let middle = left + width * 0.45;
                    let extremes = [(middle, point.least), (middle, point.most)];
                    chart.draw_series([PathElement::new(extremes, BLACK)])?;
                }
            } else {
                let line = points.iter().map(|point| (point.x, point.y));
                chart.draw_series([style.line(line.clone())])?;
                chart.draw_series(line.map(|at| Circle::new(at, 4, style.fill())))?;
            }
        }
        Ok(())
    }

    fn draw_legend(&self, area: &Area<'_>) -> Drawn {
        let text = FONT.into_text_style(area);
        let text = text.pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = LEGEND_ROW / 2;
        for (peer, style, _) in &self.series {
            if self.spec.0 == Bars {
                let corners = [(14, y - 7), (50, y + 7)];
                area.draw(&Rectangle::new(corners, style.fill()))?;
                area.draw(&Rectangle::new(corners, style.color))?;
            } else {
                area.draw(&style.line([(14, y), (50, y)].into_iter()))?;
                area.draw(&Circle::new((32, y), 4, style.fill()))?;
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
    /// A line; the dash of a solid one is longer than any line.
    fn line<I: Iterator + Clone>(self, points: I) -> DashedPathElement<I, i32> {
        let (dash, gap) = if self.is_dashed { (9, 5) } else { (1 << 20, 0) };
        DashedPathElement::new(points, dash, gap, self.color.stroke_width(self.width))
    }

    /// Light with dashed lines.
    fn fill(self) -> ShapeStyle {
        let alpha = if self.is_dashed { 0.25 } else { 1.0 };
        self.color.mix(alpha).filled()
    }
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
    use crate::samples::{missing, results, sample};

    #[test]
    fn a_run_gets_a_chart_for_each_kind_with_values() {
        let mut results = results(&["direct", "adit & co"]);
        results
            .peers
            .push(missing("openvpn", "the kernel has none"));
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
                "agents-grpc"
            ]
        );
        let bars = fs::read_to_string(&written[0]).unwrap();
        for text in [
            "<title>Throughput, gRPC client of our own</title>",
            "of adit &amp; co. Medians of 3 rounds; higher is better",
            "down x8",
            "openvpn: missing",
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
        let points = |chart: &Chart<'_>| chart.series[0].2.clone();
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
        let styled = names.iter().enumerate();
        let styles: Vec<Style> = styled.map(|(number, name)| style(number, name)).collect();
        for (at, style) in styles.iter().enumerate() {
            assert!(!styles[at + 1..].contains(style), "{style:?}");
        }
    }
}
