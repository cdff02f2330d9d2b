//! Tables of `adit status` and `adit top`: certificates, and agents whose dials fail or are slow.

use super::model::{AgentStatus, CertificateStatus};
use super::text::{clean_middle, proved};

/// A certificate with less than this number of days left is shown in red: the log warns from then on, too.
const RENEW_DAYS: u64 = 14;
/// Columns of a terminal.
const WIDTH: usize = 80;

/// A line of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct TableLine {
    pub(crate) text: String,
    /// Shown in red, where there are colours.
    pub(crate) is_alarming: bool,
}

impl TableLine {
    fn new(text: String, is_alarming: bool) -> Self {
        Self {
            text: text.trim_end().to_owned(),
            is_alarming,
        }
    }
}

/// A width that fits the texts, if they are not to be shortened.
fn width<'a>(limit: Option<usize>, head: &str, texts: impl Iterator<Item = &'a str>) -> usize {
    let longest = texts.map(|text| text.chars().count()).max();
    limit.unwrap_or_else(|| longest.unwrap_or(0).max(head.len()))
}

/// Certificates in use, the head first; empty without certificates. `is_short`: for a terminal of 80 columns.
pub(crate) fn certificates(all: &[CertificateStatus], is_short: bool) -> Vec<TableLine> {
    const KIND: usize = 11;
    const LEFT: usize = 20;
    if all.is_empty() {
        return Vec::new();
    }
    let limit = is_short.then_some(WIDTH - KIND - LEFT - 2);
    let file_width = width(
        limit,
        "CERTIFICATE",
        all.iter().map(|one| one.file.as_str()),
    );
    let head = format!(
        "{:<file_width$} {:<KIND$} {:<LEFT$}",
        "CERTIFICATE", "KIND", "VALID FOR"
    );
    let rows = all.iter().map(|one| {
        let left = match one.days_left {
            None => "EXPIRED".to_owned(),
            Some(days) if days < RENEW_DAYS => format!("{days} days, renew it"),
            Some(days) => format!("{days} days"),
        };
        let file = clean_middle(&one.file, file_width);
        let kind = clean_middle(&one.kind, KIND);
        let is_alarming = one.days_left.is_none_or(|days| days < RENEW_DAYS);
        let text = format!("{file:<file_width$} {kind:<KIND$} {left:<LEFT$}");
        TableLine::new(text, is_alarming)
    });
    let mut lines = vec![TableLine::new(head, false)];
    lines.extend(rows);
    lines
}

/// Agents whose dials fail or are slow, the head first; empty without such agents. `is_short`: for a terminal of 80 columns.
pub(crate) fn agents(all: &[AgentStatus], is_short: bool) -> Vec<TableLine> {
    const COUNT: usize = 9;
    if all.is_empty() {
        return Vec::new();
    }
    let limit = is_short.then_some((WIDTH - 3 * (COUNT + 1) - 1) / 2);
    let names: Vec<String> = all
        .iter()
        .map(|one| name(one.principal.as_deref()))
        .collect();
    let name_width = width(limit, "PROVED", names.iter().map(String::as_str));
    let id_width = width(limit, "AGENT", all.iter().map(|one| one.agent.as_str()));
    let line = |name: &str, id: &str, counts: [&str; 3]| {
        let [failed, slow, answered] = counts;
        let (name, id) = (clean_middle(name, name_width), clean_middle(id, id_width));
        format!(
            "{name:<name_width$} {id:<id_width$} {failed:>COUNT$} {slow:>COUNT$} {answered:>COUNT$}"
        )
    };
    let head = line("PROVED", "AGENT", ["FAILED", "SLOW", "IN TIME"]);
    let mut lines = vec![TableLine::new(head, false)];
    for (one, name) in all.iter().zip(&names) {
        let counts = [one.dials.failed, one.dials.slow, one.dials.answered];
        let counts = counts.map(|count| count.to_string());
        let text = line(name, &one.agent, counts.each_ref().map(String::as_str));
        lines.push(TableLine::new(text, false));
    }
    lines
}

/// What an agent has proved, in short; `-` is nothing.
pub(crate) fn name(principal: Option<&str>) -> String {
    principal.map_or_else(|| "-".to_owned(), proved)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::model::DialStatus;
    use super::*;

    pub(crate) fn certificate(file: &str, days_left: Option<u64>) -> CertificateStatus {
        CertificateStatus {
            file: file.to_owned(),
            kind: "certificate".to_owned(),
            expires: 4_102_444_800,
            days_left,
        }
    }

    pub(crate) fn agent(agent: &str, principal: Option<&str>, failed: u64) -> AgentStatus {
        AgentStatus {
            agent: agent.to_owned(),
            principal: principal.map(str::to_owned),
            dials: DialStatus {
                answered: u64::from(u32::MAX),
                slow: 2,
                failed,
            },
        }
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
