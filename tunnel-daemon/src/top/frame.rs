//! The lines of a table of tunnels, for widths from 80 columns on.

use std::time::Duration;

use super::model::{Row, Sample, sort};
use crate::status::model::Role;
use crate::status::tables::{Column, name, table};
use crate::status::text::{WIDTH, age, bytes, clean, clean_middle, micros};
use adit_config::TopSort;

/// Columns taken by all fields except peer and destination, including the spaces between.
const FIXED: usize = 48;
/// Divisor of the remaining columns that gives the peer's width, and the one with what the peer has proved beside its id.
const PEER_SHARE: usize = 3;
const PROVED_SHARE: usize = 2;

/// A sample in display order.
pub(super) struct Picture {
    pub(super) sample: Sample,
    pub(super) order: TopSort,
    pub(super) reverse: bool,
}

impl Picture {
    pub(super) fn new(sample: Sample, order: TopSort) -> Self {
        let mut picture = Self {
            sample,
            order,
            reverse: false,
        };
        picture.sort();
        picture
    }

    /// Sorts the rows: after a change of the sample or of the order.
    pub(super) fn sort(&mut self) {
        sort(&mut self.sample.rows, self.order, self.reverse);
    }

    /// Title, column heads and all rows. Without a width, as for pipes, nothing is shortened.
    pub(super) fn all(&self, width: Option<usize>) -> Vec<String> {
        let mut lines = vec![self.title(width)];
        lines.extend(self.table(width, 0, usize::MAX));
        lines
    }

    /// The observed process, and the sums.
    pub(super) fn title(&self, width: Option<usize>) -> String {
        let Sample {
            role, rows, open, ..
        } = &self.sample;
        let sum = |rate: fn(&Row) -> u64| rows.iter().map(rate).fold(0, u64::saturating_add);
        let listed = rows.len() as u64;
        let more = if listed < *open {
            format!(", {listed} listed")
        } else {
            String::new()
        };
        let text = format!(
            "{} {}  {open} tunnels{more}  {}/s to targets  {}/s to clients",
            role.name(),
            clean_middle(&self.sample.id, width.map_or(usize::MAX, |_width| 20)),
            bytes(sum(|row| row.to_target)),
            bytes(sum(|row| row.to_client)),
        );
        clean(&text, width.unwrap_or(usize::MAX))
    }

    /// The column heads, of which a mark shows the one that decides the order, and `count` rows from `from` on.
    pub(super) fn table(&self, width: Option<usize>, from: usize, count: usize) -> Vec<String> {
        let rows = &self.sample.rows;
        let has_proofs = rows.iter().any(|row| row.tunnel.principal.is_some());
        let rest = width.map(|width| width.max(WIDTH) - FIXED - 2);
        let share = if has_proofs { PROVED_SHARE } else { PEER_SHARE };
        let peer = rest.map(|rest| rest / share);
        let mark = |name: &str, order: TopSort| match (order == self.order, self.reverse) {
            (false, _) => name.to_owned(),
            (true, false) => format!("{name}*"),
            (true, true) => format!("{name}^"),
        };
        let role = match self.sample.role {
            Role::Server => "AGENT",
            Role::Agent | Role::Proxy => "SERVER",
        };
        let rate = |name: &str| Column::number(mark(name, TopSort::Rate), 7);
        let columns = [
            // A terminal has it beside the peer's id.
            match has_proofs && width.is_none() {
                true => Column::text("PROVED", None),
                false => Column::text("", Some(0)),
            },
            Column::text(mark(role, TopSort::Agent), peer),
            Column::text(
                mark("DESTINATION", TopSort::Destination),
                rest.zip(peer).map(|(rest, peer)| rest - peer),
            ),
            Column::text("PATH", Some(8)),
            Column::number(mark("AGE", TopSort::Age), 6),
            rate("TGT/s"),
            rate("CLI/s"),
            Column::number(mark("BYTES", TopSort::Bytes), 6),
            Column::number(mark("RTT", TopSort::Rtt), 5),
            Column::number(mark("RE", TopSort::Retransmits), 3),
        ];
        let beside = peer.filter(|_| has_proofs);
        let rows = rows.iter().skip(from).take(count);
        table(columns, rows.map(|row| cells(row, beside)).collect())
    }
}

/// `beside`: width of a column for what the peer has proved and the peer's id.
fn cells(row: &Row, beside: Option<usize>) -> [String; 10] {
    let tunnel = &row.tunnel;
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let proved = name(tunnel.principal.as_deref());
    let peer = match beside {
        None => tunnel.peer.clone(),
        Some(width) => {
            // An id is often random: the name gets up to half of the column.
            let proved = clean_middle(&proved, width / 2);
            let rest = width.saturating_sub(proved.chars().count() + 1);
            format!("{proved} {}", clean_middle(&tunnel.peer, rest))
        }
    };
    [
        proved,
        peer,
        tunnel.destination.clone(),
        tunnel.path.clone(),
        age(Duration::from_secs_f64(tunnel.age_seconds.clamp(0.0, 1e9))),
        bytes(row.to_target),
        bytes(row.to_client),
        bytes(row.bytes()),
        known(tunnel.rtt_micros.map(micros)),
        known(tunnel.retransmits.map(|count| count.min(999).to_string())),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::model::Sampler;
    use super::super::tests::{tunnel, tunnels};
    use super::*;

    fn picture(order: TopSort) -> Picture {
        let mut widest = tunnel(1, u64::MAX / 4);
        widest.peer = "agent-with-a-long-name.example.org".to_owned();
        widest.destination = "\x1b[2J[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".to_owned();
        widest.principal = Some("CN=a-proved-name-that-is-long".to_owned());
        widest.path = "raw-lane".to_owned();
        widest.age_seconds = 9_999.0 * 86_400.0;
        widest.rtt_micros = Some(999_999);
        widest.retransmits = Some(u64::MAX);
        let seen = tunnels(1, vec![widest, tunnel(2, 10), tunnel(3, 20)]);
        Picture::new(Sampler::default().take(seen, Instant::now()), order)
    }

    #[test]
    fn lines_fit_the_width_and_have_no_control_characters() {
        for (_, order) in TopSort::ALL {
            for width in [80, 100, 200] {
                let lines = picture(order).all(Some(width));
                assert_eq!(lines.len(), 5);
                for line in &lines {
                    assert!(line.chars().count() <= width, "{width}: {line:?}");
                    assert!(!line.contains(char::is_control), "{line:?}");
                }
                assert_eq!(lines[1].chars().count(), width, "{:?}", lines[1]);
            }
        }
    }

    #[test]
    fn output_to_a_pipe_is_not_shortened() {
        let lines = picture(TopSort::Rate).all(None);
        for part in [
            "agent-with-a-long-name.example.org ",
            "a-proved-name-that-is-long ",
            "[2J[2001:db8:1234:5678:9abc:def0:1234:5678]:65535 ",
        ] {
            assert!(lines.iter().any(|line| line.contains(part)), "{lines:?}");
        }
        let ends: Vec<usize> = lines[1..].iter().map(|line| line.chars().count()).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains(char::is_control)));
    }

    #[test]
    fn what_an_agent_has_proved_is_beside_its_id() {
        let mut row = tunnel(2, 10);
        row.peer = "de9b433a-4d9c-4f1c-9a0a-2e6a2679b36c4".to_owned();
        row.principal = Some("CN=edge-1".to_owned());
        let mut nothing = tunnel(3, 20);
        nothing.principal = None;
        let seen = tunnels(1, vec![row, nothing]);
        let sample = Sampler::default().take(seen, Instant::now());
        let picture = Picture::new(sample, TopSort::Age);
        let lines = picture.all(Some(WIDTH));
        assert!(lines[2].starts_with("edge-1 de9~36c4 "), "{lines:?}");
        assert!(lines[3].starts_with("- agent-1 "), "{lines:?}");
        let whole = picture.all(None);
        let both = ["edge-1 ", " de9b433a-4d9c-4f1c-9a0a-2e6a2679b36c4 "];
        assert!(both.iter().all(|text| whole[2].contains(text)), "{whole:?}");
    }

    #[test]
    fn the_sort_column_is_marked() {
        for (order, mark) in [
            (TopSort::Rate, "TGT/s*"),
            (TopSort::Bytes, "BYTES*"),
            (TopSort::Age, "AGE*"),
            (TopSort::Agent, "AGENT*"),
            (TopSort::Destination, "DESTINATION*"),
            (TopSort::Rtt, "RTT*"),
            (TopSort::Retransmits, "RE*"),
        ] {
            let columns = picture(order).table(Some(WIDTH), 0, 0).remove(0);
            assert!(columns.contains(mark), "{columns}");
        }
    }

    #[test]
    fn the_title_counts_open_and_listed_tunnels() {
        let mut seen = tunnels(1, vec![tunnel(2, 10)]);
        seen.open = 23_456;
        let sample = Sampler::default().take(seen, Instant::now());
        let title = Picture::new(sample, TopSort::Rate).title(Some(WIDTH));
        assert!(title.contains("23456 tunnels, 1 listed"), "{title}");
    }
}
