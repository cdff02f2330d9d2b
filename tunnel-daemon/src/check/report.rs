//! The report of `adit check` and its exit code.

use std::process::ExitCode;

use serde::Serialize;

use crate::status::model::{API, Capability, Verdict};
use crate::status::text::{clean, wrapped};

/// Exit code if something is missing or nothing could be checked, so that no script takes the host for suitable.
pub(crate) const MISSING: u8 = 2;

/// Columns of a line.
const WIDTH: usize = 80;
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
        Self {
            api: API,
            result: lines
                .iter()
                .map(|line| line.verdict)
                .fold(Verdict::Ok, Verdict::max),
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
            let text = clean(&line.text, usize::MAX);
            for (number, part) in wrapped(&text, WIDTH - INDENT).iter().enumerate() {
                let (verdict, name) = if number == 0 {
                    (line.verdict.name(), line.name.as_str())
                } else {
                    ("", "")
                };
                out.push_str(&format!("{verdict:<9} {name:<18} {part}\n"));
            }
            if let Some(remedy) = &line.remedy {
                let remedy = format!("remedy: {}", clean(remedy, usize::MAX));
                for part in wrapped(&remedy, WIDTH - INDENT - 2) {
                    out.push_str(&format!("{:INDENT$}  {part}\n", ""));
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::{degraded, info, missing, ok};
    use super::*;

    #[test]
    fn the_worst_line_sets_the_exit_code() {
        for (lines, code) in [
            (vec![], 0),
            (vec![ok("a", "b")], 0),
            (vec![info(degraded("a", "b", "c"))], 0),
            (
                vec![info(degraded("a", "b", "c")), degraded("a", "b", "c")],
                1,
            ),
            (vec![degraded("a", "b", "c"), ok("a", "b")], 1),
            (vec![missing("a", "b", "c"), degraded("a", "b", "c")], 2),
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
            ok("kernel", "6.12.104"),
            missing(
                "frontend",
                "a text that is long enough to be broken in two lines \x1b[2J of them",
                "mend it",
            ),
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
