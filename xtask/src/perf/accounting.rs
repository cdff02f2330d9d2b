//! Whether this host lets accounting be measured.

use std::process::Command;

use anyhow::Context as _;

use super::peer::may_make_cgroups;
use super::programs::Programs;
use crate::workspace::Workspace;

/// What keeps the cost of accounting from being measured here, if anything does: as our release build says it.
///
/// # Errors
/// The build fails, or does not say.
pub(crate) fn why_not_accounted(workspace: &Workspace) -> anyhow::Result<Option<String>> {
    let adit = Programs::new(workspace, None)?.adit()?;
    // Only what flags need is judged. The rest of an agent's flags has to be there, and need not hold.
    let asked = [
        "check",
        "--json",
        "agent",
        "--proxy-server-host=127.0.0.1",
        "--ca-cert=/dev/null",
        "--account=on",
    ];
    let out = Command::new(adit).args(asked).output()?;
    let refused = lacks_for_accounting(&out.stdout).context("reading adit check --json")?;
    let no_cgroup = || may_make_cgroups().err();
    Ok(refused.or_else(|| no_cgroup().map(|why| format!("{why:#}"))))
}

/// What `adit check --json` prints, as far as it matters here.
#[derive(serde::Deserialize)]
struct Checked {
    lines: Vec<CheckedLine>,
}

#[derive(serde::Deserialize)]
struct CheckedLine {
    name: String,
    verdict: String,
    text: String,
}

fn lacks_for_accounting(checked: &[u8]) -> anyhow::Result<Option<String>> {
    let checked: Checked = serde_json::from_slice(checked)?;
    for needed in ["cgroup2", "ebpf"] {
        let line = checked.lines.iter().find(|line| line.name == needed);
        let line = line.with_context(|| format!("it says nothing of {needed}"))?;
        anyhow::ensure!(line.verdict != "info", "{needed} is not judged");
        if line.verdict != "ok" {
            return Ok(Some(format!("{needed}: {}", line.text)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounting_is_measured_where_our_program_says_that_it_works() {
        let checked = |cgroup2: &str, ebpf: &str| {
            format!(
                r#"{{"api":1,"result":"ok","lines":[
                {{"name":"cgroup2","verdict":"{cgroup2}","text":"a","remedy":null}},
                {{"name":"ebpf","verdict":"{ebpf}","text":"no right","remedy":"b"}}]}}"#
            )
        };
        let lacks = |text: String| lacks_for_accounting(text.as_bytes());
        assert_eq!(lacks(checked("ok", "ok")).unwrap(), None);
        let refused = lacks(checked("ok", "missing")).unwrap();
        assert_eq!(refused.as_deref(), Some("ebpf: no right"));
        assert!(lacks(checked("missing", "ok")).unwrap().is_some());
        // Words that are not there any more would skip the measurement for ever.
        assert!(lacks(r#"{"lines":[]}"#.to_owned()).is_err());
        assert!(lacks(checked("info", "ok")).is_err());
    }
}
