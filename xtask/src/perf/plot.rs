//! The report as pictures: throughput, latency against load, memory against idle connections and agents, engines.
//!
//! Here is what is drawn; `canvas` draws it, `axis` chooses scales and `look` the colours.

mod axis;
mod canvas;
mod look;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use self::axis::Scale;
use self::canvas::{Bar, Content, Group, Picture, Series};
use self::look::Looks;
use super::results::{Cell, Results};
use super::rows::{Better, Row};
use super::scenario::Way;

/// What is drawn against a number in the names of rows.
struct Against {
    file: &'static str,
    title: &'static str,
    /// First word of the rows' names, and their metric.
    rows: (&'static str, &'static str),
    axes: (&'static str, &'static str),
    scale: Scale,
}

const LINES: [Against; 5] = [
    Against {
        file: "latency-p50",
        title: "Latency of an echo, median",
        rows: ("paced", "p50_us"),
        axes: LATENCY,
        scale: Scale::Logarithmic,
    },
    Against {
        file: "latency-p99",
        title: "Latency of an echo, 99th percentile",
        rows: ("paced", "p99_us"),
        axes: LATENCY,
        scale: Scale::Logarithmic,
    },
    Against {
        file: "memory",
        title: "Memory with idle connections",
        rows: ("idle", "resident_mib"),
        axes: ("idle connections", "MiB resident, all processes"),
        scale: Scale::Linear,
    },
    Against {
        file: "agents",
        title: "Memory of a server with idle agents",
        rows: ("agents", "server_mib"),
        axes: ("agents", "MiB resident, server"),
        scale: Scale::Linear,
    },
    Against {
        file: "agents-cpu",
        title: "CPU time of a server with idle agents",
        rows: ("agents", "idle_cpu_percent"),
        axes: ("agents", "% of a core, server"),
        scale: Scale::Linear,
    },
];

const LATENCY: (&str, &str) = (
    "echoes asked for in a second",
    "time since it was due, logarithmic",
);

/// Draws what the run has numbers for, into `folder`. Returns what was written.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn draw(results: &Results, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let peers: Vec<&str> = names(results).collect();
    let looks = Looks::new(&peers);
    let mut written = Vec::new();
    for (name, picture) in pictures(results) {
        let path = folder.join(format!("{name}.svg"));
        let svg = picture.to_svg(&looks)?;
        fs::write(&path, svg).with_context(|| format!("writing {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

/// Each with the name of its file.
fn pictures(results: &Results) -> Vec<(String, Picture)> {
    let mut all = Vec::new();
    for way in results.ways() {
        let peers = names(results).filter(|peer| !is_engine(peer)).collect();
        let view = View {
            results,
            way,
            peers,
        };
        let name = way.name();
        let title = format!("Throughput, {}", client(way));
        let throughput = view.bars("gbit_s", title, "Gbit/s");
        all.extend(throughput.map(|picture| (format!("throughput-{name}"), picture)));
        for against in &LINES {
            let picture = view.lines(against);
            all.extend(picture.map(|picture| (format!("{}-{name}", against.file), picture)));
        }
    }
    if names(results).any(is_engine) {
        let view = View {
            results,
            way: results.ways().first().copied().unwrap_or(Way::Tcp),
            peers: names(results)
                .filter(|peer| is_engine(peer) || *peer == "direct")
                .collect(),
        };
        for (file, title, metric, unit) in [
            ("engines", "Throughput of a relay alone", "gbit_s", "Gbit/s"),
            (
                "engines-cpu",
                "CPU time of a relay alone",
                "cpu_s_per_gib",
                "CPU s/GiB",
            ),
        ] {
            let picture = view.bars(metric, title.to_owned(), unit);
            all.extend(picture.map(|picture| (file.to_owned(), picture)));
        }
    }
    all
}

fn names(results: &Results) -> impl Iterator<Item = &str> {
    results.peers.iter().map(|peer| peer.name.as_str())
}

fn is_engine(peer: &str) -> bool {
    peer.starts_with("relay-")
}

/// Who asks, for a title.
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

impl View<'_> {
    /// A group of bars for each bulk measurement, if there is one.
    fn bars(&self, metric: &str, title: String, unit: &str) -> Option<Picture> {
        let suffix = format!("_{metric}");
        // `down_8`, not `mixed_down` or `down_8_machine`.
        let name = |row: &Row| {
            let name = row.key.strip_suffix(&suffix)?;
            let is_bulk = row.measurement == "bulk" && name.matches('_').count() == 1;
            is_bulk.then(|| name.replace('_', " x"))
        };
        let mut rows = self.results.rows(self.way);
        rows.retain(|row| name(row).is_some());
        let group = |row: &Row| {
            let bars = self.peers.iter().filter_map(|peer| self.bar(peer, row));
            let bars: Vec<Bar> = bars.collect();
            let name = name(row).filter(|_name| !bars.is_empty())?;
            Some(Group { name, bars })
        };
        let groups: Vec<Group> = rows.iter().filter_map(group).collect();
        if groups.is_empty() {
            return None;
        }
        Some(Picture {
            title,
            note: format!(
                "{}; thin lines from the least to the most.",
                self.note(&rows)
            ),
            across: "download (down) or upload (up) x streams".to_owned(),
            up: unit.to_owned(),
            content: Content::Bars(groups),
            absent: self.absent(&rows),
        })
    }

    fn bar(&self, peer: &str, row: &Row) -> Option<Bar> {
        let value = self.results.value(peer, self.way, &row.key)?;
        let rounds = self.results.values(peer, self.way, &row.key);
        Some(Bar {
            peer: peer.to_owned(),
            value,
            least: rounds.iter().copied().fold(value, f64::min),
            most: rounds.iter().copied().fold(value, f64::max),
        })
    }

    /// A metric against the number in the names of its rows, if some peer has it: `paced_500_p50_us` at 500.
    fn lines(&self, against: &Against) -> Option<Picture> {
        let (kind, metric) = against.rows;
        let at = |row: &Row| -> Option<f64> {
            let rest = row.key.strip_prefix(kind)?.strip_prefix('_')?;
            let number = rest.strip_suffix(metric)?.strip_suffix('_')?;
            number.parse().ok()
        };
        let mut rows = self.results.rows(self.way);
        rows.retain(|row| at(row).is_some());
        let series = |peer: &&str| Series {
            peer: (*peer).to_owned(),
            points: rows
                .iter()
                .filter_map(|row| Some((at(row)?, self.results.value(peer, self.way, &row.key)?)))
                .collect(),
        };
        let mut lines: Vec<Series> = self.peers.iter().map(series).collect();
        lines.retain(|line| !line.points.is_empty());
        if lines.is_empty() {
            return None;
        }
        let (across, up) = against.axes;
        Some(Picture {
            title: format!("{}, {}", against.title, client(self.way)),
            note: format!("{}.", self.note(&rows)),
            across: across.to_owned(),
            up: up.to_owned(),
            content: Content::Lines(lines, against.scale),
            absent: self.absent(&rows),
        })
    }

    /// What all values of a picture have in common.
    fn note(&self, rows: &[Row]) -> String {
        let rounds = match self.results.rounds() {
            1 => "One round".to_owned(),
            more => format!("Medians of {more} rounds"),
        };
        let better = match rows.first().map(|row| row.better) {
            Some(Better::Higher) => "higher is better",
            Some(Better::Lower) | None => "lower is better",
        };
        format!("{rounds}; {better}")
    }

    /// Who should have had these rows, which are of one measurement, and why they have not.
    fn absent(&self, rows: &[Row]) -> Vec<String> {
        let why = |peer: &&str| {
            let word = match self.results.cell(peer, self.way, rows.first()?) {
                Cell::Failed => "failed",
                Cell::Missing => "missing",
                Cell::Value(_) | Cell::Nothing => return None,
            };
            Some(format!("{peer}: {word}"))
        };
        self.peers.iter().filter_map(why).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::perf::results::{Entry, Sample};

    fn sample(values: &[(&str, f64)]) -> Sample {
        let values = values
            .iter()
            .map(|(key, value)| ((*key).to_owned(), *value));
        Sample {
            values: values.collect(),
            distributions: BTreeMap::new(),
        }
    }

    fn sampled(values: &[(&str, f64)]) -> Results {
        let mut results = Results::default();
        for name in ["direct", "adit"] {
            results.peers.push(Entry {
                name: name.to_owned(),
                state: Ok("1".to_owned()),
            });
        }
        results.add(("adit", Way::Grpc), 1, "bulk", Ok(sample(values)));
        results
    }

    fn picture(results: &Results, name: &str) -> Picture {
        let mut all = pictures(results).into_iter();
        let (_, picture) = all.find(|(file, _)| file == name).unwrap();
        picture
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
        let text = fs::read_to_string(&written[0]).unwrap();
        assert!(text.contains("adit") && text.contains("down x8"), "{text}");
        assert!(
            text.contains("Throughput, gRPC client of our own"),
            "{text}"
        );
    }

    #[test]
    fn peer_has_the_same_colour_in_all_pictures() {
        let folder = tempfile::tempdir().unwrap();
        // Colours of peers that are not known are given in turn. The first is in one picture and not in the other, which must not
        // give the second another one there.
        let peers = ["theirs", "mine"];
        let mut results = Results::default();
        results.peers.extend(peers.map(|name| Entry {
            name: name.to_owned(),
            state: Ok("1".to_owned()),
        }));
        let theirs = sample(&[("down_8_gbit_s", 20.0)]);
        let mine = sample(&[("down_8_gbit_s", 9.0), ("idle_100_resident_mib", 10.0)]);
        for (peer, sample) in peers.into_iter().zip([theirs, mine]) {
            results.add((peer, Way::Grpc), 1, "bulk", Ok(sample));
        }
        let color = Looks::new(&peers).of("mine").color;
        let color = format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2);
        let written = draw(&results, folder.path()).unwrap();
        assert_eq!(written.len(), 2);
        for path in written {
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(&color), "{}", path.display());
        }
    }

    #[test]
    fn points_lie_at_the_number_in_the_name() {
        let results = sampled(&[("paced_500_p50_us", 100.0), ("paced_2000_p50_us", 200.0)]);
        let Content::Lines(lines, scale) = picture(&results, "latency-p50-grpc").content else {
            panic!("latency has lines");
        };
        assert_eq!(scale, Scale::Logarithmic);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].peer, "adit");
        assert_eq!(lines[0].points, [(500.0, 100.0), (2000.0, 200.0)]);
    }

    #[test]
    fn bars_reach_from_the_worst_to_the_best_round() {
        let mut results = sampled(&[("down_8_gbit_s", 9.0)]);
        for (round, value) in [(2, 5.0), (3, 10.0)] {
            let one = Ok(sample(&[("down_8_gbit_s", value)]));
            results.add(("adit", Way::Grpc), round, "bulk", one);
        }
        let picture = picture(&results, "throughput-grpc");
        assert_eq!(
            picture.note,
            "Medians of 3 rounds; higher is better; thin lines from the least to the most."
        );
        let Content::Bars(groups) = picture.content else {
            panic!("throughput has bars");
        };
        let bar = &groups[0].bars[0];
        assert_eq!((bar.least, bar.value, bar.most), (5.0, 9.0, 10.0));
    }

    #[test]
    fn peers_that_failed_or_are_missing_are_named_beside_the_picture() {
        let mut results = sampled(&[("paced_500_p99_us", 100.0)]);
        results.add(("direct", Way::Tcp), 1, "paced", Err("hung".to_owned()));
        results.peers.push(Entry {
            name: "wireguard".to_owned(),
            state: Err("the kernel has none".to_owned()),
        });
        let picture = picture(&results, "latency-p99-grpc");
        assert_eq!(picture.absent, ["direct: failed", "wireguard: missing"]);
    }

    #[test]
    fn engines_have_pictures_of_their_own() {
        let mut results = sampled(&[("down_8_gbit_s", 9.0)]);
        results.peers.push(Entry {
            name: "relay-tokio".to_owned(),
            state: Ok("1".to_owned()),
        });
        let relay = Ok(sample(&[
            ("down_8_gbit_s", 13.0),
            ("down_8_cpu_s_per_gib", 0.4),
        ]));
        results.add(("relay-tokio", Way::Tcp), 1, "bulk", relay);
        let names: Vec<String> = pictures(&results)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["throughput-grpc", "engines", "engines-cpu"]);
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(draw(&Results::default(), folder.path()).unwrap().is_empty());
    }
}
