//! The report for people: one table per dialect, with ratios to upstream and to HAProxy beside the numbers.

use std::fmt::Write as _;

use adit_perf_plan::Dialect;

use super::results::{Cell, Results, State};
use super::rows::Row;

/// Peers of ours and those that they are compared with, if both are in the run.
const AGAINST: [[&str; 2]; 3] = [
    ["adit", "upstream"],
    ["adit", "haproxy"],
    ["adit-proxy", "hypershift-proxy"],
];

/// Largest spread that is printed: a larger one only shows that a round went wrong.
const SPREAD_MAX: f64 = 9.995;

/// From this spread on the peer is named: it was unsteady, and the others may not have been.
const SPREAD_NAMED: f64 = 1.0;

/// The whole report.
pub(crate) fn report(results: &Results, heading: &str) -> String {
    let mut text = heading.to_owned();
    text.push_str("\n| peer | what is measured |\n| --- | --- |\n");
    for peer in &results.peers {
        let state = match &peer.state {
            State::Version(version) => version.clone(),
            State::Missing(why) => format!("missing: {}", one_line(why)),
        };
        writeln!(text, "| {} | {state} |", peer.name).ok();
    }
    for (dialect, why) in &results.ways_missing {
        let why = one_line(why);
        writeln!(text, "| all in {} | missing: {why} |", dialect.name()).ok();
    }
    for dialect in results.dialects() {
        table(results, dialect, &mut text);
    }
    let failures = results.failures();
    if !failures.is_empty() {
        text.push_str("\n| failed | dialect | measurement | why |\n| --- | --- | --- | --- |\n");
        for (peer, dialect, measurement, why) in failures {
            let (dialect, why) = (dialect.name(), one_line(why));
            writeln!(text, "| {peer} | {dialect} | {measurement} | {why} |").ok();
        }
    }
    text
}

fn table(results: &Results, dialect: Dialect, text: &mut String) {
    let against: Vec<[&str; 2]> = AGAINST
        .into_iter()
        .filter(|pair| pair.iter().all(|name| is_measured(results, name)))
        .collect();
    let mut head = format!("\n### {}\n\n| measurement |", dialect.name());
    let mut rule = "| --- |".to_owned();
    for peer in &results.peers {
        write!(head, " {} |", peer.name).ok();
        rule.push_str(" ---: |");
    }
    for [ours, theirs] in &against {
        write!(head, " {ours} / {theirs} |").ok();
        rule.push_str(" ---: |");
    }
    writeln!(text, "{head} spread | better |\n{rule} ---: | --- |").ok();
    for row in results.rows(dialect) {
        write!(text, "| {} |", row.words).ok();
        for peer in &results.peers {
            let cell = results.cell(&peer.name, dialect, &row);
            write!(text, " {} |", show(cell)).ok();
        }
        for pair in &against {
            let ratio = ratio(results, dialect, &row, *pair);
            write!(text, " {} |", ratio.map_or_else(dash, number)).ok();
        }
        let better = row.better.name();
        let spread = spread(results, dialect, &row);
        writeln!(text, " {} | {better} |", spread.unwrap_or_else(dash)).ok();
    }
}

fn is_measured(results: &Results, name: &str) -> bool {
    let mut peers = results.peers.iter();
    peers.any(|peer| peer.name == name && matches!(peer.state, State::Version(_)))
}

/// The value of a peer of ours divided by another peer's.
fn ratio(results: &Results, dialect: Dialect, row: &Row, [ours, theirs]: [&str; 2]) -> Option<f64> {
    let ours = results.value(ours, dialect, &row.key)?;
    let theirs = results.value(theirs, dialect, &row.key)?;
    (theirs != 0.0).then(|| ours / theirs)
}

/// The largest spread of all peers with a number in this row: a smaller difference between peers means nothing.
fn spread(results: &Results, dialect: Dialect, row: &Row) -> Option<String> {
    let spreads = results.peers.iter().filter_map(|peer| {
        let name = peer.name.as_str();
        results.value(name, dialect, &row.key)?;
        Some((results.spread(name, dialect, &row.key)?, name))
    });
    let (widest, name) = spreads.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    if widest >= SPREAD_MAX {
        return Some(format!("> ±999 % ({name})"));
    }
    let percent = widest * 100.0;
    Some(if widest >= SPREAD_NAMED {
        format!("±{percent:.0} % ({name})")
    } else {
        format!("±{percent:.0} %")
    })
}

fn show(cell: Cell) -> String {
    match cell {
        // Over a long path a tenth of a Gbit/s is a lot.
        Cell::Value(value) if value.abs() < 1.0 => format!("{value:.4}"),
        Cell::Value(value) => number(value),
        Cell::Failed => "failed".to_owned(),
        Cell::Missing => "missing".to_owned(),
        Cell::Nothing => dash(),
    }
}

fn number(value: f64) -> String {
    let digits = if value.abs() >= 100.0 { 0 } else { 2 };
    format!("{value:.digits$}")
}

fn dash() -> String {
    "-".to_owned()
}

/// Text that fits a cell: the first lines of an error say most, and vertical bars would end the cell.
pub(crate) fn one_line(text: &str) -> String {
    let line: String = text
        .chars()
        .map(|c| if c == '\n' || c == '|' { ' ' } else { c })
        .take(300)
        .collect();
    line.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{missing, results, sample};

    #[test]
    fn table_has_values_ratios_spread_and_missing_and_failed_runs() {
        let mut results = results(&["upstream", "adit", "haproxy"]);
        results
            .peers
            .push(missing("openvpn", "the kernel has none\nat all"));
        let why = "no Go |\ntoolchain".to_owned();
        results.ways_missing.insert(Dialect::GrpcGo, why);
        for (peer, dialect, values) in [
            ("upstream", Dialect::Grpc, [1.0, 9.0, 2.0]),
            ("adit", Dialect::Grpc, [8.0, 7.0, 7.5]),
            ("haproxy", Dialect::Tcp, [15.0, 15.0, 15.0]),
        ] {
            for (round, value) in (1..).zip(values) {
                let one = Ok(sample(&[("down_1_gbit_s", value)]));
                results.add((peer, dialect), round, "bulk", one);
                let hangs = if value == 9.0 { 5e6 } else { 310.0 };
                let one = Ok(sample(&[("paced_1000_p50_us", hangs)]));
                results.add((peer, dialect), round, "paced", one);
            }
        }
        let dialect = ("adit", Dialect::Grpc);
        results.add(dialect, 3, "paced", Err("stream 1 | broke".to_owned()));
        let text = report(&results, "heading\n");
        for row in [
            "| download, 1 stream, Gbit/s | 2.00 | 7.50 | 15.00 | missing | 3.75 | 0.50 | ±200 % (upstream) | higher |",
            "| echo at 1000/s, p50, us | 310 | failed | 310 | missing | - | - | > ±999 % (upstream) | lower |",
            "| openvpn | missing: the kernel has none at all |",
            "| all in grpc-go | missing: no Go   toolchain |",
            "| adit | grpc | paced | stream 1   broke |",
        ] {
            assert!(text.contains(row), "{row} in {text}");
        }
        assert!(
            text.contains("### grpc\n") && !text.contains("### grpc-go"),
            "{text}"
        );
    }
}
