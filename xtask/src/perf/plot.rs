//! The report as pictures: throughput, latency against load, memory against idle connections and agents, engines.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use plotters::prelude::*;

use super::results::Results;
use super::rows::Row;
use super::scenario::Way;

/// Size of a picture.
const SIZE: (u32, u32) = (960, 540);
/// Text that does not change size with the picture.
const FONT: (&str, u32) = ("sans-serif", 15);

/// Space above the largest value, for the legend.
const ROOM: f64 = 1.4;

/// What is drawn against how many there are.
struct Cost {
    file: &'static str,
    title: &'static str,
    /// First word of the rows' names, and their metric.
    rows: (&'static str, &'static str),
    axes: (&'static str, &'static str),
}

const COSTS: [Cost; 3] = [
    Cost {
        file: "memory",
        title: "Memory",
        rows: ("idle", "resident_mib"),
        axes: ("idle connections", "MiB resident, all processes"),
    },
    Cost {
        file: "agents",
        title: "Memory of the server",
        rows: ("agents", "server_mib"),
        axes: ("agents", "MiB resident, server"),
    },
    Cost {
        file: "agents-cpu",
        title: "CPU time of an idle server",
        rows: ("agents", "idle_cpu_percent"),
        axes: ("agents", "% of a core"),
    },
];

/// A line: what it is called, and its points.
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
}

/// Bars of one group: what it is called, and a value of each peer that has one.
struct Group {
    name: String,
    bars: Vec<(String, f64)>,
}

/// Draws what the run has numbers for, into `folder`. Returns what was written.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn draw(results: &Results, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    for way in results.ways() {
        let name = way.name();
        let peers: Vec<&str> = results
            .peers
            .iter()
            .map(|peer| peer.name.as_str())
            .filter(|peer| !peer.starts_with("relay-"))
            .collect();
        let to = |what: &str| folder.join(format!("{what}-{name}.svg"));
        let bulk = groups(results, way, &peers, "gbit_s");
        if !bulk.is_empty() {
            written.push(to("throughput"));
            bars(
                &to("throughput"),
                &format!("Throughput, {name}"),
                "Gbit/s",
                &bulk,
            )?;
        }
        for percentile in ["p50", "p99"] {
            let metric = format!("{percentile}_us");
            let latency = against(results, way, &peers, "paced", &metric);
            if latency.is_empty() {
                continue;
            }
            let path = to(&format!("latency-{percentile}"));
            let title = format!("Latency, {percentile}, {name}");
            let axes = (
                "echoes asked for in a second",
                "microseconds from the time it was due",
            );
            lines(&path, &title, axes, &latency)?;
            written.push(path);
        }
        for cost in &COSTS {
            let (kind, metric) = cost.rows;
            let series = against(results, way, &peers, kind, metric);
            if !series.is_empty() {
                written.push(to(cost.file));
                let title = format!("{}, {name}", cost.title);
                lines(&to(cost.file), &title, cost.axes, &series)?;
            }
        }
    }
    let engines: Vec<&str> = results
        .peers
        .iter()
        .map(|peer| peer.name.as_str())
        .filter(|peer| peer.starts_with("relay-") || *peer == "direct")
        .collect();
    if engines.len() > 1 {
        let way = results.ways().first().copied().unwrap_or(Way::Tcp);
        for (what, metric, unit) in [
            ("engines", "gbit_s", "Gbit/s"),
            ("engines-cpu", "cpu_s_per_gib", "CPU s/GiB"),
        ] {
            let groups = groups(results, way, &engines, metric);
            if !groups.is_empty() {
                written.push(folder.join(format!("{what}.svg")));
                bars(
                    &folder.join(format!("{what}.svg")),
                    "Engines",
                    unit,
                    &groups,
                )?;
            }
        }
    }
    Ok(written)
}

/// A group of bars for each bulk measurement.
fn groups(results: &Results, way: Way, peers: &[&str], metric: &str) -> Vec<Group> {
    let suffix = format!("_{metric}");
    let mut all = Vec::new();
    for row in results.rows(way) {
        let Some(name) = row.key.strip_suffix(&suffix) else {
            continue;
        };
        // `down_8`, not `mixed_down` or `down_8_machine`.
        let is_bulk = row.measurement == "bulk" && name.matches('_').count() == 1;
        let value = |peer: &&str| {
            let value = results.value(peer, way, &row.key)?;
            Some(((*peer).to_owned(), value))
        };
        let bars: Vec<(String, f64)> = peers.iter().filter_map(value).collect();
        if is_bulk && !bars.is_empty() {
            let name = name.replace("down_", "down x").replace("up_", "up x");
            all.push(Group { name, bars });
        }
    }
    all
}

/// For each peer, a metric against the number in its name: `paced_500_p50_us` at 500.
fn against(results: &Results, way: Way, peers: &[&str], kind: &str, metric: &str) -> Vec<Series> {
    let rows: Vec<(Row, f64)> = results
        .rows(way)
        .into_iter()
        .filter_map(|row| {
            let rest = row.key.strip_prefix(kind)?.strip_prefix('_')?;
            let number = rest.strip_suffix(metric)?.strip_suffix('_')?;
            let number = number.parse().ok()?;
            Some((row, number))
        })
        .collect();
    let series = |peer: &&str| {
        let point = |(row, at): &(Row, f64)| Some((*at, results.value(peer, way, &row.key)?));
        Series {
            name: (*peer).to_owned(),
            points: rows.iter().filter_map(point).collect(),
        }
    };
    let all = peers.iter().map(series);
    all.filter(|series| !series.points.is_empty()).collect()
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

fn lines(
    path: &Path,
    title: &str,
    (across, up): (&str, &str),
    all: &[Series],
) -> anyhow::Result<()> {
    let points = || all.iter().flat_map(|series| &series.points);
    let right = points().map(|(x, _)| *x).fold(0.0, f64::max) * 1.05;
    let top = points().map(|(_, y)| *y).fold(0.0, f64::max) * ROOM;
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, FONT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..right.max(1.0), 0.0..top.max(1.0))
        .map_err(failed)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_desc(across)
        .y_desc(up)
        .draw()
        .map_err(failed)?;
    for (number, series) in all.iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), color).point_size(3))
            .map_err(failed)?
            .label(series.name.clone())
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], color.filled()));
    }
    legend(&mut chart)?;
    area.present().map_err(failed)
}

fn bars(path: &Path, title: &str, unit: &str, groups: &[Group]) -> anyhow::Result<()> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in groups.iter().flat_map(|group| &group.bars) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let values = groups.iter().flat_map(|group| &group.bars);
    let top = values.map(|(_, value)| *value).fold(0.0, f64::max) * ROOM;
    let width = 0.8 / names.len().max(1) as f64;
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, FONT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..groups.len() as f64, 0.0..top.max(0.01))
        .map_err(failed)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .disable_x_mesh()
        .x_labels(0)
        .y_desc(unit)
        .draw()
        .map_err(failed)?;
    for (number, name) in names.iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let bar = |(at, group): (usize, &Group)| {
            let (_, value) = group.bars.iter().find(|(peer, _)| peer == name)?;
            let left = at as f64 + 0.1 + width * number as f64;
            Some(Rectangle::new(
                [(left, 0.0), (left + width * 0.9, *value)],
                color.filled(),
            ))
        };
        chart
            .draw_series(groups.iter().enumerate().filter_map(bar))
            .map_err(failed)?
            .label((*name).to_owned())
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], color.filled()));
    }
    legend(&mut chart)?;
    // Below each group its name: labels of a numeric axis would be numbers.
    for (at, group) in groups.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(at as f64 + 0.5, 0.0));
        let style = FONT.into_text_style(&area);
        let centred = style.pos(plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Center,
            plotters::style::text_anchor::VPos::Top,
        ));
        area.draw(&Text::new(group.name.clone(), (x, y + 8), centred))
            .map_err(failed)?;
    }
    area.present().map_err(failed)
}

type Numbers =
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>;

fn legend<'a>(chart: &mut ChartContext<'a, SVGBackend<'a>, Numbers>) -> anyhow::Result<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(FONT)
        .draw()
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::perf::results::{Entry, Sample};

    fn sampled(values: &[(&str, f64)]) -> Results {
        let mut results = Results::default();
        for name in ["direct", "adit"] {
            results.peers.push(Entry {
                name: name.to_owned(),
                state: Ok("1".to_owned()),
            });
        }
        let values: BTreeMap<String, f64> = values
            .iter()
            .map(|(key, value)| ((*key).to_owned(), *value))
            .collect();
        let sample = Sample {
            values,
            distributions: BTreeMap::new(),
        };
        results.add(("adit", Way::Grpc), 1, "bulk", Ok(sample));
        results
    }

    #[test]
    fn picture_names_its_peers_and_groups() {
        let folder = tempfile::tempdir().unwrap();
        let results = sampled(&[
            ("down_8_gbit_s", 9.0),
            ("paced_500_p50_us", 100.0),
            ("paced_2000_p50_us", 200.0),
            ("idle_100_resident_mib", 10.0),
            ("agents_100_server_mib", 10.0),
        ]);
        let written = draw(&results, folder.path()).unwrap();
        let names: Vec<_> = written
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(
            names,
            [
                "throughput-grpc.svg",
                "latency-p50-grpc.svg",
                "memory-grpc.svg",
                "agents-grpc.svg"
            ]
        );
        let text = std::fs::read_to_string(&written[0]).unwrap();
        assert!(text.contains("adit") && text.contains("down x8"), "{text}");
    }

    #[test]
    fn points_lie_at_the_number_in_the_name() {
        let results = sampled(&[("paced_500_p50_us", 100.0), ("paced_2000_p50_us", 200.0)]);
        let series = against(&results, Way::Grpc, &["adit", "direct"], "paced", "p50_us");
        assert_eq!(series.len(), 1);
        assert_eq!(series[0].name, "adit");
        assert_eq!(series[0].points, [(500.0, 100.0), (2000.0, 200.0)]);
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(draw(&Results::default(), folder.path()).unwrap().is_empty());
    }
}
