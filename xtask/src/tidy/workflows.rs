//! Workflows of GitHub: they can only read, no action is named by what can change its meaning, and no job runs without a limit.
//! `cargo xtask workflows` checks their syntax.

use crate::workspace::Workspace;

const FOLDER: &str = ".github/workflows";
/// Digits of a commit.
const COMMIT: usize = 40;

/// Checks all workflows.
///
/// # Errors
/// A file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    if !workspace.path(FOLDER).exists() {
        return Ok(findings);
    }
    for file in workspace.files(FOLDER)? {
        let text = workspace.text(&file)?.unwrap_or_default();
        let flaws = flaws(&text).into_iter();
        findings.extend(flaws.map(|(line, what)| format!("{file}:{line}: {what}")));
    }
    Ok(findings)
}

/// Lines and what is wrong with them.
fn flaws(text: &str) -> Vec<(usize, &'static str)> {
    let mut flaws = Vec::new();
    if !text.contains("\npermissions:\n  contents: read\n") {
        flaws.push((1, "no `permissions:` of `contents: read` alone"));
    }
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in (1..).zip(&lines) {
        let trimmed = line.trim_start().trim_start_matches("- ");
        let below = |wanted: &str| {
            let step = lines.iter().skip(number);
            let mut step = step.take_while(|next| !next.trim_start().starts_with("- "));
            step.any(|next| next.trim() == wanted)
        };
        if let Some(action) = trimmed.strip_prefix("uses: ") {
            if !is_pinned(action) {
                flaws.push((
                    number,
                    "an action without its commit: write NAME@COMMIT # VERSION",
                ));
            }
            if action.starts_with("actions/checkout@") && !below("persist-credentials: false") {
                flaws.push((
                    number,
                    "a checkout that keeps credentials: set persist-credentials to false",
                ));
            }
        } else if trimmed.starts_with("runs-on:") && !below_job(&lines, number) {
            flaws.push((number, "a job without timeout-minutes"));
        } else if trimmed.starts_with("permissions:") && line.starts_with(' ') {
            flaws.push((number, "a job with permissions of its own"));
        }
    }
    flaws
}

/// Whether the key behind `runs-on` is the limit.
fn below_job(lines: &[&str], number: usize) -> bool {
    let next = lines.get(number).map(|line| line.trim_start());
    next.is_some_and(|next| next.starts_with("timeout-minutes: "))
}

/// Whether an action is named by a commit, with its version as a comment.
fn is_pinned(action: &str) -> bool {
    let parts = action
        .split_once('@')
        .and_then(|(_, rest)| rest.split_once(" # v"));
    parts.is_some_and(|(commit, version)| {
        let is_hex = commit.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_hex && commit.len() == COMMIT && !version.is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RIGHT: &str = "on:\n  push:\npermissions:\n  contents: read\njobs:\n  a:\n    runs-on: b\n    timeout-minutes: 90\n    steps:\n\
        \x20     - uses: actions/checkout@0123456789abcdef0123456789abcdef01234567 # v1.0.0\n\
        \x20       with:\n          persist-credentials: false\n      - run: c\n";

    #[test]
    fn what_a_workflow_must_have_is_missed() {
        assert_eq!(flaws(RIGHT), []);
        for (has, instead, line) in [
            ("contents: read", "contents: write", 1),
            ("timeout-minutes", "name", 7),
            ("67 # v1.0.0", "6 # v1.0.0", 10),
            (
                "@0123456789abcdef0123456789abcdef01234567 # v1.0.0",
                "@v1",
                10,
            ),
            ("persist-credentials: false", "fetch-depth: 2", 10),
            ("    steps:", "    permissions:", 9),
        ] {
            let wrong = RIGHT.replace(has, instead);
            let found: Vec<usize> = flaws(&wrong).iter().map(|(line, _)| *line).collect();
            assert_eq!(found, [line], "{instead}");
        }
    }
}
