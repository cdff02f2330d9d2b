//! What the names of measured numbers mean: words for people, unit, direction, place in the table.

use std::cmp::Ordering;

/// Which way a number should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    /// More of it.
    Higher,
    /// Less of it.
    Lower,
}

/// A number by its name, explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The name the load tools print.
    pub(crate) key: String,
    /// The same for people, with its unit.
    pub(crate) words: String,
    /// Its direction.
    pub(crate) better: Better,
    /// Which measurement it comes from.
    pub(crate) measurement: &'static str,
    order: (usize, u64, usize),
}

impl Row {
    /// Explains a name; `None` for one this harness does not know, which must not become a row without a meaning.
    pub(crate) fn of(key: &str) -> Option<Self> {
        let words: Vec<&str> = key.split('_').collect();
        let (measurement, subject, number, metric) = match words.as_slice() {
            ["isolation", metric @ ..] => {
                ("isolation", "echo beside stalled readers".into(), 0, metric)
            }
            ["mixed", "echo", metric @ ..] => ("mixed", "echo beside downloads".into(), 0, metric),
            ["mixed", "down", metric @ ..] => ("mixed", "downloads beside echo".into(), 1, metric),
            ["agents", number, metric @ ..] => {
                let number: u64 = number.parse().ok()?;
                // Memory in KiB is that of one, all else the server has for all of them.
                let whose = match metric.last() {
                    Some(&"kib") => "one of ",
                    _ => "",
                };
                ("agents", format!("{whose}{number} agents"), number, metric)
            }
            ["idle", number, metric @ ..] => {
                let number: u64 = number.parse().ok()?;
                // A share is that of all.
                let whose = match metric.last() {
                    Some(&"percent") => "",
                    _ => "one of ",
                };
                let subject = format!("{whose}{number} idle connections");
                ("idle", subject, number, metric)
            }
            [kind, number, metric @ ..] => {
                let number: u64 = number.parse().ok()?;
                let (measurement, subject) = subject(kind, number)?;
                (measurement, subject, number, metric)
            }
            _ => return None,
        };
        let (place, metric, better) = metric_of(&metric.join("_"))?;
        let kind = KINDS.iter().position(|kind| words.first() == Some(kind))?;
        Some(Self {
            key: key.to_owned(),
            words: format!("{subject}, {metric}"),
            better,
            measurement,
            order: (kind, number, place),
        })
    }
}

impl Ord for Row {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.order, &self.key).cmp(&(other.order, &other.key))
    }
}

impl PartialOrd for Row {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// First words of names, in the order of the table.
const KINDS: [&str; 10] = [
    "down",
    "up",
    "echo",
    "paced",
    "dials",
    "mixed",
    "isolation",
    "idle",
    "agents",
    "links",
];

fn subject(kind: &str, number: u64) -> Option<(&'static str, String)> {
    let plural = if number == 1 { "" } else { "s" };
    Some(match kind {
        "down" => ("bulk", format!("download, {number} stream{plural}")),
        "up" => ("bulk", format!("upload, {number} stream{plural}")),
        "echo" => ("echo", format!("echo, {number} connection{plural}")),
        "paced" => ("paced", format!("echo at {number}/s")),
        "dials" => (
            "dials",
            format!("dial, echo, close with {number} worker{plural}"),
        ),
        "links" => ("links", format!("links of {number} agent{plural} at once")),
        _ => return None,
    })
}

/// Place within its subject, words with unit, direction.
fn metric_of(metric: &str) -> Option<(usize, String, Better)> {
    use Better::{Higher, Lower};
    let known = [
        ("gbit_s", "Gbit/s", Higher),
        ("per_s", "1/s", Higher),
        ("p50_us", "p50, us", Lower),
        ("p99_us", "p99, us", Lower),
        ("p999_us", "p99.9, us", Lower),
        ("unanswered", "questions without an answer", Lower),
        ("cpu_us", "CPU us each", Lower),
        ("cpu_s_per_gib", "CPU s/GiB", Lower),
        ("machine_cpu_s_per_gib", "whole machine's CPU s/GiB", Lower),
        ("completed", "goes on (1 = yes)", Higher),
        ("p50_ratio", "p50 / p50 without", Lower),
        ("p99_ratio", "p99 / p99 without", Lower),
        ("kib", "both processes, KiB", Lower),
        ("lanes_percent", "on lanes, %", Higher),
        ("kernel_kib", "kernel structures, KiB", Lower),
        ("tcp_buffers_kib", "TCP buffers, KiB", Lower),
        ("resident_mib", "resident memory of all, MiB", Lower),
        ("server_mib", "resident memory of the server, MiB", Lower),
        ("idle_cpu_percent", "idle server, % of a core", Lower),
        ("dial_p50_us", "dial and one echo, p50, us", Lower),
        ("dial_p99_us", "dial and one echo, p99, us", Lower),
        ("dial_p999_us", "dial and one echo, p99.9, us", Lower),
    ];
    if let Some(place) = known.iter().position(|(name, _, _)| *name == metric) {
        let (_, words, better) = known.get(place)?;
        return Some((place, (*words).to_owned(), *better));
    }
    let role = metric.strip_suffix("_kib")?;
    Some((known.len(), format!("{role}, KiB"), Lower))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(key: &str) -> String {
        Row::of(key).unwrap().words
    }

    #[test]
    fn names_become_words_with_units() {
        assert_eq!(words("down_1_gbit_s"), "download, 1 stream, Gbit/s");
        assert_eq!(words("up_8_cpu_s_per_gib"), "upload, 8 streams, CPU s/GiB");
        assert_eq!(words("echo_16_p999_us"), "echo, 16 connections, p99.9, us");
        assert_eq!(
            words("idle_2000_server_kib"),
            "one of 2000 idle connections, server, KiB"
        );
        assert_eq!(
            words("idle_2000_lanes_percent"),
            "2000 idle connections, on lanes, %"
        );
        assert_eq!(words("mixed_echo_p99_us"), "echo beside downloads, p99, us");
        assert_eq!(
            words("agents_1000_server_kib"),
            "one of 1000 agents, server, KiB"
        );
        assert_eq!(
            words("agents_1000_idle_cpu_percent"),
            "1000 agents, idle server, % of a core"
        );
        assert_eq!(words("links_300_per_s"), "links of 300 agents at once, 1/s");
        assert_eq!(
            words("agents_300_dial_p50_us"),
            "300 agents, dial and one echo, p50, us"
        );
    }

    #[test]
    fn direction_follows_the_metric() {
        assert_eq!(Row::of("dials_8_per_s").unwrap().better, Better::Higher);
        assert_eq!(Row::of("dials_8_p50_us").unwrap().better, Better::Lower);
    }

    #[test]
    fn rows_sort_by_subject_then_number_then_metric() {
        let mut keys = [
            "idle_10_kib",
            "down_64_gbit_s",
            "down_8_cpu_s_per_gib",
            "down_8_gbit_s",
        ]
        .map(|key| Row::of(key).unwrap());
        keys.sort();
        let keys = keys.map(|row| row.key);
        assert_eq!(
            keys,
            [
                "down_8_gbit_s",
                "down_8_cpu_s_per_gib",
                "down_64_gbit_s",
                "idle_10_kib"
            ]
        );
    }

    #[test]
    fn unknown_names_are_no_rows() {
        for key in [
            "",
            "down",
            "down_x_gbit_s",
            "down_1_furlongs",
            "left_1_gbit_s",
        ] {
            assert_eq!(Row::of(key), None, "{key}");
        }
    }
}
