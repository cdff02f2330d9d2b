//! Meaning of measured numbers by name: words for people, unit, direction, place in the table.

/// The direction in which a number improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Better {
    /// Larger is better.
    Higher,
    /// Smaller is better.
    Lower,
}

impl Better {
    /// For people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Higher => "higher",
            Self::Lower => "lower",
        }
    }

    /// Whether a value is worse than another one by more than a share of it.
    pub(crate) fn is_worse(self, value: f64, than: f64, share: f64) -> bool {
        match self {
            Self::Higher => value < than * (1.0 - share),
            Self::Lower => value > than * (1.0 + share),
        }
    }
}

/// A number and its meaning. Rows sort by subject, then number, then metric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    order: (usize, u64, usize),
    /// The name, as the load tools print it.
    pub(crate) key: String,
    /// Words for people, with the unit.
    pub(crate) words: String,
    /// The direction in which it improves.
    pub(crate) better: Better,
    /// The measurement it comes from.
    pub(crate) measurement: &'static str,
}

/// Prefixes of names in the order of the table; their measurement; and words, in which N stands for the number after the
/// prefix.
const KINDS: [(&str, &str, &str); 14] = [
    ("down", "bulk", "download, N streams"),
    ("up", "bulk", "upload, N streams"),
    ("echo", "echo", "echo, N connections"),
    ("cold", "burst", "echo after the first burst of N dials"),
    ("warm", "burst", "echo after the second burst of N dials"),
    ("paced", "paced", "echo at N/s"),
    ("dials", "dials", "dial, echo, close with N workers"),
    ("mixed_echo", "mixed", "echo beside downloads"),
    ("mixed_down", "mixed", "downloads beside echo"),
    (
        "limited",
        "mixed",
        "echo beside downloads limited to N Mbit/s",
    ),
    ("isolation", "isolation", "echo beside stalled readers"),
    ("idle", "idle", "N idle connections"),
    ("agents", "agents", "N agents"),
    ("links", "links", "links of N agents at once"),
];

/// Suffixes of names in the order of the table; words with the unit; and the direction.
const METRICS: [(&str, &str, Better); 20] = {
    use Better::{Higher, Lower};
    [
        ("gbit_s", "Gbit/s", Higher),
        ("per_s", "1/s", Higher),
        ("p50_us", "p50, us", Lower),
        ("p99_us", "p99, us", Lower),
        ("p999_us", "p99.9, us", Lower),
        ("unanswered", "questions without an answer", Lower),
        ("cpu_us", "CPU us each", Lower),
        ("cpu_s_per_gib", "CPU s/GiB", Lower),
        ("completed", "goes on (1 = yes)", Higher),
        ("p50_ratio", "p50 / p50 without", Lower),
        ("p99_ratio", "p99 / p99 without", Lower),
        ("kib", "all processes, KiB", Lower),
        ("lanes_percent", "on lanes, %", Higher),
        ("kernel_kib", "kernel structures, KiB", Lower),
        ("resident_mib", "resident memory of all, MiB", Lower),
        ("server_mib", "resident memory of the server, MiB", Lower),
        ("idle_cpu_percent", "idle server, % of a core", Lower),
        ("dial_p50_us", "dial and one echo, p50, us", Lower),
        ("dial_p99_us", "dial and one echo, p99, us", Lower),
        ("dial_p999_us", "dial and one echo, p99.9, us", Lower),
    ]
};

impl Row {
    /// Explains a name; `None` for an unknown name, which must not become a row without a meaning.
    pub(crate) fn of(key: &str) -> Option<Self> {
        let behind = |kind: &str| key.strip_prefix(kind)?.strip_prefix('_');
        let kind = KINDS.iter().position(|(kind, ..)| behind(kind).is_some())?;
        let (begin, measurement, subject) = *KINDS.get(kind)?;
        let rest = behind(begin)?;
        let (number, metric) = if subject.contains('N') {
            let (number, metric) = rest.split_once('_')?;
            (number.parse::<u64>().ok()?, metric)
        } else {
            (0, rest)
        };
        let mut subject = subject.replace('N', &number.to_string());
        if number == 1 {
            for one in ["stream", "connection", "worker", "agent"] {
                subject = subject.replace(&format!("{one}s"), one);
            }
        }
        // Memory in KiB is per tunnel or agent; all other numbers are totals.
        if ["idle", "agents"].contains(&begin) && metric.ends_with("kib") {
            subject.insert_str(0, "one of ");
        }
        let place = METRICS.iter().position(|(name, ..)| *name == metric);
        let (words, better) = match place.and_then(|place| METRICS.get(place)) {
            Some((_, words, better)) => ((*words).to_owned(), *better),
            // Memory of a process, named by its role.
            None => (
                format!("{}, KiB", metric.strip_suffix("_kib")?),
                Better::Lower,
            ),
        };
        Some(Self {
            order: (kind, number, place.unwrap_or(METRICS.len())),
            key: key.to_owned(),
            words: format!("{subject}, {words}"),
            better,
            measurement,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_labels_with_units_in_table_order() {
        let told = [
            "down_1_gbit_s: download, 1 stream, Gbit/s",
            "up_8_cpu_s_per_gib: upload, 8 streams, CPU s/GiB",
            "echo_16_p50_us: echo, 16 connections, p50, us",
            "echo_16_p999_us: echo, 16 connections, p99.9, us",
            "echo_128_p50_us: echo, 128 connections, p50, us",
            "cold_16_dial_p50_us: echo after the first burst of 16 dials, dial and one echo, p50, us",
            "warm_16_per_s: echo after the second burst of 16 dials, 1/s",
            "mixed_echo_p99_us: echo beside downloads, p99, us",
            "limited_1000_p50_us: echo beside downloads limited to 1000 Mbit/s, p50, us",
            "idle_2000_lanes_percent: 2000 idle connections, on lanes, %",
            "idle_2000_server_kib: one of 2000 idle connections, server, KiB",
            "agents_1000_idle_cpu_percent: 1000 agents, idle server, % of a core",
            "agents_1000_server_kib: one of 1000 agents, server, KiB",
            "links_300_per_s: links of 300 agents at once, 1/s",
        ];
        let told = told.map(|line| line.split_once(": ").unwrap());
        let mut rows = told.map(|(key, words)| {
            let row = Row::of(key).unwrap();
            assert_eq!(row.words, words);
            row
        });
        rows.sort();
        assert_eq!(rows.map(|row| row.key), told.map(|(key, _)| key));
        assert_eq!(Row::of("dials_8_per_s").unwrap().better, Better::Higher);
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
