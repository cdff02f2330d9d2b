//! The report of `adit check` and its exit code.

use std::process::ExitCode;

use serde::Serialize;

use crate::status::model::{API, Capability, Verdict};
use crate::status::text::labelled;

/// Exit code if something is missing or nothing could be checked, so that no script takes the host for suitable.
pub(crate) const MISSING: u8 = 2;

/// Columns before the text.
const INDENT: usize = 29;

/// All results.
#[derive(Serialize, Debug)]
pub(super) struct Report {
    api: u32,
    /// The worst verdict of the lines.
    result: Verdict,
    lines: Vec<Capability>,
}

impl Report {
    pub(super) fn new(lines: Vec<Capability>) -> Self {
        let worst = lines.iter().map(|line| line.verdict).max();
        Self {
            api: API,
            result: worst.map_or(Verdict::Ok, |worst| worst.max(Verdict::Ok)),
            lines,
        }
    }

    /// 0 all ok, 1 something degraded, 2 something missing.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.result {
            Verdict::Info | Verdict::Ok => 0,
            Verdict::Degraded => 1,
            Verdict::Missing => MISSING,
        })
    }

    /// # Errors
    /// No error is known.
    pub(super) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Lines for people, at most 80 characters wide unless a word is longer.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        for line in &self.lines {
            let name = format!("{:<9} {}", line.verdict.name(), line.name);
            out += &labelled(&name, INDENT, &line.text);
            if let Some(remedy) = &line.remedy {
                out += &labelled("", INDENT + 2, &format!("remedy: {remedy}"));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::{degraded, missing, ok};
    use super::*;
    use crate::status::text::WIDTH;

    #[test]
    fn the_worst_line_sets_the_exit_code() {
        for (lines, code) in [
            (vec![], 0),
            (vec![ok("b")], 0),
            (vec![degraded("b", "c").info()], 0),
            (vec![degraded("b", "c").info(), degraded("b", "c")], 1),
            (vec![degraded("b", "c"), ok("b")], 1),
            (vec![missing("b", "c"), degraded("b", "c")], 2),
        ] {
            let report = Report::new(lines);
            assert_eq!(
                format!("{:?}", report.exit_code()),
                format!("{:?}", ExitCode::from(code))
            );
        }
    }

    #[test]
    fn report_lines_show_verdict_text_and_remedy() {
        let report = Report::new(vec![
            ok("6.12.104").named("kernel"),
            missing(
                "a text that is long enough to be broken in two lines \x1b[2J of them",
                "mend it",
            )
            .named("frontend"),
        ]);
        let text = report.text();
        assert!(
            text.starts_with("ok        kernel             6.12.104\nmissing   frontend "),
            "{text}"
        );
        assert!(
            text.contains("  remedy: mend it\n") && !text.contains('\x1b'),
            "{text}"
        );
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        let json: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        assert_eq!(
            (json["api"].as_u64(), json["result"].as_str()),
            (Some(1), Some("missing"))
        );
        assert_eq!(json["lines"][1]["remedy"], "mend it");
    }
}
