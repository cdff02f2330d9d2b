//! A parser for the Prometheus text format, sufficient for assertions.

use std::collections::BTreeMap;

/// All samples of one scrape.
pub(crate) struct Scrape {
    samples: Vec<Sample>,
}

struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Scrape {
    /// Parses the text, and skips other lines.
    pub(crate) fn parse(text: &str) -> Self {
        Self {
            samples: text.lines().filter_map(Sample::parse).collect(),
        }
    }

    /// Sum of all samples of a family whose labels include `labels`. A family without samples counts as zero, because unused
    /// label sets are not exported.
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &Sample| {
            labels
                .iter()
                .all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
        };
        self.samples
            .iter()
            .filter(|sample| sample.name == name && has(sample))
            .map(|sample| sample.value)
            .sum()
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (series, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let Some((name, labels)) = series.split_once('{') else {
            return Some(Self {
                name: series.to_owned(),
                labels: BTreeMap::new(),
                value,
            });
        };
        // Label values are enums and ids: they contain no comma and no quote.
        let labels = labels
            .trim_end_matches('}')
            .split(',')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.trim_matches('"').to_owned()))
            .collect();
        Some(Self {
            name: name.to_owned(),
            labels,
            value,
        })
    }
}

#[test]
fn a_scrape_sums_the_samples_whose_labels_match() {
    let scrape = Scrape::parse(
        "# HELP a b\nfailures{reason=\"x\",code=\"1\"} 2\nfailures{reason=\"y\"} 3\nup 1\n",
    );
    assert_eq!(scrape.value("failures", &[]), 5.0);
    assert_eq!(scrape.value("failures", &[("reason", "x")]), 2.0);
    assert_eq!(scrape.value("up", &[]), 1.0);
    assert_eq!(scrape.value("absent", &[]), 0.0);
}
