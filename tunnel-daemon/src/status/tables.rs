//! Tables for people, and those of `adit status` and `adit top`: certificates, and agents whose dials fail or are slow.

use std::iter;

use super::model::{AgentStatus, CertificateStatus};
use super::text::{WIDTH, clean_middle, proved};

/// A certificate with less than this number of days left is shown in red: the log warns from then on, too.
const RENEW_DAYS: u64 = 14;

/// A line of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct TableLine {
    pub(crate) text: String,
    /// Shown in red, where there are colours.
    pub(crate) is_alarming: bool,
}

/// A column of a table.
pub(crate) struct Column {
    head: String,
    /// Longer texts are shortened in the middle; without a width the longest text fits.
    width: Option<usize>,
    is_number: bool,
}

impl Column {
    pub(crate) fn text(head: impl Into<String>, width: Option<usize>) -> Self {
        Self {
            head: head.into(),
            width,
            is_number: false,
        }
    }

    /// A column of texts at its right side.
    pub(crate) fn number(head: impl Into<String>, width: usize) -> Self {
        Self {
            is_number: true,
            ..Self::text(head, Some(width))
        }
    }
}

/// The heads of the columns, and below them the rows. No text controls a terminal.
pub(crate) fn table<const N: usize>(columns: [Column; N], rows: Vec<[String; N]>) -> Vec<String> {
    let heads = columns.each_ref().map(|column| column.head.clone());
    let lines = iter::once(heads).chain(rows).collect::<Vec<_>>();
    let widths: [usize; N] = std::array::from_fn(|at| {
        let longest = lines.iter().map(|cells| cells[at].chars().count()).max();
        columns[at].width.or(longest).unwrap_or(0)
    });
    let line = |cells: &[String; N]| {
        let cells = iter::zip(cells, iter::zip(&columns, widths));
        let cells = cells.map(|(cell, (column, width))| {
            // A number is never cut: it would be another one.
            let cell = clean_middle(cell, if column.is_number { usize::MAX } else { width });
            match column.is_number {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            }
        });
        // A column without a width and without texts is none.
        let cells = cells.filter(|cell| !cell.is_empty()).collect::<Vec<_>>();
        cells.join(" ").trim_end().to_owned()
    };
    lines.iter().map(line).collect()
}

/// Whether a certificate has expired or soon will.
pub(crate) fn ends_soon(one: &CertificateStatus) -> bool {
    one.days_left.is_none_or(|days| days < RENEW_DAYS)
}

/// How long a certificate is valid.
pub(crate) fn days_left(one: &CertificateStatus) -> String {
    match one.days_left {
        None => "EXPIRED".to_owned(),
        Some(days) if days < RENEW_DAYS => format!("{days} days, renew it"),
        Some(days) => format!("{days} days"),
    }
}

/// Certificates in use, the head first; empty without certificates. `is_short`: for a terminal of 80 columns.
pub(crate) fn certificates(all: &[CertificateStatus], is_short: bool) -> Vec<TableLine> {
    const KIND: usize = 11;
    const LEFT: usize = 20;
    let rows = all.iter().map(|one| {
        let left = days_left(one);
        [one.file.clone(), one.kind.clone(), left]
    });
    let columns = [
        Column::text("CERTIFICATE", is_short.then_some(WIDTH - KIND - LEFT - 2)),
        Column::text("KIND", Some(KIND)),
        Column::text("VALID FOR", Some(LEFT)),
    ];
    table_lines(columns, rows.collect(), all.iter().map(ends_soon))
}

/// Agents whose dials fail or are slow, the head first; empty without such agents. `is_short`: for a terminal of 80 columns.
pub(crate) fn agents(all: &[AgentStatus], is_short: bool) -> Vec<TableLine> {
    const COUNT: usize = 9;
    let width = is_short.then_some((WIDTH - 3 * (COUNT + 1) - 1) / 2);
    let rows = all.iter().map(|one| {
        let counts = [one.dials.failed, one.dials.slow, one.dials.answered];
        let [failed, slow, answered] = counts.map(|count| count.to_string());
        let proved = name(one.principal.as_deref());
        [proved, one.agent.clone(), failed, slow, answered]
    });
    let columns = [
        Column::text("PROVED", width),
        Column::text("AGENT", width),
        Column::number("FAILED", COUNT),
        Column::number("SLOW", COUNT),
        Column::number("IN TIME", COUNT),
    ];
    table_lines(columns, rows.collect(), iter::repeat(false))
}

/// The head, and the rows with their alarms; empty without rows.
pub(crate) fn table_lines<const N: usize>(
    columns: [Column; N],
    rows: Vec<[String; N]>,
    alarms: impl Iterator<Item = bool>,
) -> Vec<TableLine> {
    if rows.is_empty() {
        return Vec::new();
    }
    let alarms = iter::once(false).chain(alarms);
    iter::zip(table(columns, rows), alarms)
        .map(|(text, is_alarming)| TableLine { text, is_alarming })
        .collect()
}

/// The lines as text. `colours`: alarming lines are red.
pub(crate) fn painted(lines: &[TableLine], colours: bool) -> String {
    let line = |line: &TableLine| match colours && line.is_alarming {
        true => format!("\x1b[1;31m{}\x1b[0m\n", line.text),
        false => format!("{}\n", line.text),
    };
    lines.iter().map(line).collect()
}

/// What an agent has proved, in short; `-` is nothing.
pub(crate) fn name(principal: Option<&str>) -> String {
    principal.map_or_else(|| "-".to_owned(), proved)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{agent, certificate};
    use super::*;

    #[test]
    fn a_text_is_shortened_in_its_middle_and_a_number_never() {
        let columns = [Column::text("NAME", Some(5)), Column::number("COUNT", 5)];
        let row = ["abcdefghij".to_owned(), "4294967295".to_owned()];
        assert_eq!(table(columns, vec![row])[1], "ab~ij 4294967295");
    }

    #[test]
    fn certificates_alarm_below_fourteen_days() {
        let long = format!("/etc/\x1b[2J{}/tls.crt", "x".repeat(100));
        let all = [
            (None, "EXPIRED"),
            (Some(13), "13 days, renew it"),
            (Some(14), "14 days"),
        ];
        let rows: Vec<_> = all.map(|(days, _)| certificate(&long, days)).to_vec();
        let lines = certificates(&rows, true);
        assert!(lines[0].text.starts_with("CERTIFICATE ") && !lines[0].is_alarming);
        for (line, (_, shown)) in lines[1..].iter().zip(all) {
            assert!(line.text.ends_with(shown), "{line:?}");
            assert!(line.text.chars().count() <= WIDTH, "{line:?}");
            assert!(!line.text.contains(char::is_control), "{line:?}");
        }
        let alarms: Vec<bool> = lines.iter().map(|line| line.is_alarming).collect();
        assert_eq!(alarms, [false, true, true, false]);
        assert!(!certificates(&rows, false)[1].text.contains('~'));
        assert_eq!(certificates(&[], true), []);
    }

    #[test]
    fn agents_are_listed_with_what_they_have_proved() {
        let id = "de9b433a-4d9c-4f1c-9a0a-2e6a2679b36c4";
        let rows = [agent(id, Some("CN=edge-1"), 7), agent("\x1b[2J", None, 1)];
        let lines = agents(&rows, true);
        assert!(lines[1].text.starts_with("edge-1 ") && lines[2].text.starts_with("- "));
        for line in &lines {
            assert!(line.text.chars().count() <= WIDTH, "{line:?}");
            assert!(!line.text.contains(char::is_control), "{line:?}");
        }
        assert!(agents(&rows, false)[1].text.contains(id));
        assert_eq!(agents(&[], true), []);
    }
}
