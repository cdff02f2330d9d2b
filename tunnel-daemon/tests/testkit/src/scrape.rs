//! Samples of metrics from the text of a scrape.

/// The value of a series in a scrape; `None` if the series is missing, so that no test passes on a misspelt name.
pub fn sample(text: &str, series: &str) -> Option<f64> {
    let mut named = samples(text).filter(|(name, _)| *name == series);
    named.next().map(|(_, value)| value)
}

/// The value of a series, which must exist.
pub fn value(text: &str, series: &str) -> f64 {
    sample(text, series).unwrap_or_else(|| panic!("no series {series}"))
}

/// The sum of all series of a family that has labels.
pub fn sum(text: &str, family: &str) -> f64 {
    let is_of_it = |name: &str| {
        let labels = name.strip_prefix(family);
        labels.is_some_and(|labels| labels.starts_with('{'))
    };
    let of_it = samples(text).filter(|(name, _)| is_of_it(name));
    of_it.map(|(_, value)| value).sum()
}

/// Number of lanes opened since the start, from the text of a scrape: open and closed lanes.
pub fn lanes_opened(text: &str) -> f64 {
    sum(text, "adit_lanes") + sum(text, "adit_lanes_closed_total")
}

/// Names and values.
fn samples(text: &str) -> impl Iterator<Item = (&str, f64)> {
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    lines.filter_map(|(name, value)| Some((name, value.parse().ok()?)))
}
