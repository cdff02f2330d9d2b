//! Scripts of `xtask/scripts`: sequences of commands, which people can also run by hand.

use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use crate::steps::{Outcome, shown, status_of};
use crate::workspace::Workspace;

/// Longest time for a script: most of it builds from nothing.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// The same for a script that people start: fuzzing lasts as long as they say.
const ASKED_LIMIT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Exit code of a script that cannot run here; see `common.sh`.
const SKIPPED: i32 = 77;

/// Arguments that a script reads itself.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Arguments of the script; its first lines describe them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// A command that runs a script of this workspace.
pub(crate) fn command(workspace: &Workspace, name: &str) -> Command {
    let mut command = workspace.command("bash");
    command.arg(
        workspace
            .path("xtask/scripts")
            .join(name)
            .with_extension("sh"),
    );
    command
}

/// Runs a script with arguments from the command line.
///
/// # Errors
/// As [`outcome`].
pub(crate) fn run(workspace: &Workspace, name: &str, args: &Args) -> anyhow::Result<Outcome> {
    outcome_within(command(workspace, name).args(&args.args), ASKED_LIMIT)
}

/// Runs a line of shell in the root folder, with the functions of the scripts.
///
/// # Errors
/// As [`outcome`].
pub(crate) fn line(workspace: &Workspace, line: &str) -> anyhow::Result<Outcome> {
    let script = format!(". xtask/scripts/common.sh; {line}");
    outcome(workspace.command("bash").args(["-c", &script, "xtask"]))
}

/// Runs a script, which may report that it cannot run here.
///
/// # Errors
/// It fails, or runs for too long.
pub(crate) fn outcome(command: &mut Command) -> anyhow::Result<Outcome> {
    outcome_within(command, LIMIT)
}

fn outcome_within(command: &mut Command, limit: Duration) -> anyhow::Result<Outcome> {
    let reason = tempfile::NamedTempFile::new()?;
    let status = status_of(command.env("SKIPPED_TO", reason.path()), limit)?;
    if status.code() == Some(SKIPPED) {
        let why = std::fs::read_to_string(reason.path())?;
        return Ok(Outcome::Skipped(why.trim().to_owned()));
    }
    ensure!(status.success(), "`{}` ended with {status}", shown(command));
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    /// Runs a line of shell in another repository, which is not that of a git hook. The error is what the line says.
    fn said(workspace: &Workspace, line: &str) -> Result<(), String> {
        let line = format!("unset $(git rev-parse --local-env-vars); set -e; {line}");
        let output = workspace.command("bash").args(["-c", &line]).output();
        let output = output.unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        output.status.success().then_some(()).ok_or(text)
    }

    /// A repository of these files and the scripts.
    fn repository(files: &[(&str, &str)]) -> (tempfile::TempDir, Workspace) {
        let (folder, workspace) = sample(files);
        let scripts = Workspace::here().unwrap().path("xtask/scripts");
        let copy = format!("mkdir xtask; cp -r '{}' xtask", scripts.display());
        said(&workspace, &format!("{copy}; git init --quiet; git add .")).unwrap();
        (folder, workspace)
    }

    #[test]
    fn a_script_is_done_is_skipped_with_its_reason_or_fails() {
        let workspace = Workspace::here().unwrap();
        assert!(matches!(line(&workspace, "need sh"), Ok(Outcome::Done)));
        let skipped = line(&workspace, "need no-such-program");
        assert!(
            matches!(skipped, Ok(Outcome::Skipped(why)) if why == "no-such-program is not installed")
        );
        assert!(line(&workspace, "false; true").is_err());
    }

    #[test]
    fn names_writes_what_its_check_finds() {
        let manifest = |at: &str| {
            format!(
                "version = \"0.2.0\"\nhomepage = \"https://{at}/a\"\nrepository = \"https://{at}/a.git\"\nregistry = \"{at}\"\n"
            )
        };
        let chart = "version: 0.2.0\nappVersion: \"0.2.0\"\nhome: https://old.test/a\nsources: [https://old.test/a.git]\n\
            icon: https://old.test/a/docs/icon.svg\n      image: old.test/adit:0.2.0\n";
        let page = "`old.test/adit:0.2.0` of <https://old.test/a.git>\n";
        let (_folder, workspace) = repository(&[
            ("Cargo.toml", &manifest("old.test")),
            ("deploy/chart/Chart.yaml", chart),
            (
                "deploy/chart/values.yaml",
                "image:\n  repository: old.test/adit\n",
            ),
            ("docs/icon.svg", "<svg/>"),
            ("docs/a.md", page),
        ]);
        let check = || said(&workspace, "bash xtask/scripts/names.sh --check");
        assert_eq!(check(), Ok(()));
        // An old address contains another, and one of the new ones an old.
        let fork = manifest("of.old.test/fork");
        std::fs::write(workspace.path("Cargo.toml"), &fork).unwrap();
        let stale = check().unwrap_err();
        for place in [
            "Chart.yaml:3",
            "Chart.yaml:6",
            "values.yaml:2",
            "docs/a.md:1",
        ] {
            assert!(stale.contains(&format!("{place}:")), "{place}: {stale}");
        }
        said(&workspace, "bash xtask/scripts/names.sh").unwrap();
        assert_eq!(check(), Ok(()));
        let text = |file| workspace.text(file).unwrap().unwrap();
        assert_eq!(text("Cargo.toml"), fork);
        assert_eq!(
            text("docs/a.md"),
            page.replace("old.test", "of.old.test/fork")
        );
        // What has never been in the chart is found, and left to people.
        let other = "docker://other.test/adit-shell:0.2.0\n";
        std::fs::write(workspace.path("docs/b.md"), other).unwrap();
        assert!(check().unwrap_err().contains("docs/b.md:1:"));
    }

    #[test]
    fn a_workflow_that_can_write_or_change_is_found() {
        let right = "permissions:\n  contents: read\njobs:\n  a:\n    runs-on: b\n    timeout-minutes: 90\n    steps:\n\
            \x20     - uses: actions/checkout@0123456789abcdef0123456789abcdef01234567 # v1.0.0\n\
            \x20       with:\n          persist-credentials: false\n";
        let file = ".github/workflows/a.yml";
        let (_folder, workspace) = repository(&[(file, right)]);
        let pins = || said(&workspace, "bash xtask/scripts/workflows.sh --pins");
        assert_eq!(pins(), Ok(()));
        for (has, instead, remedy) in [
            (
                "0123456789abcdef0123456789abcdef01234567 #",
                "v1 #",
                "COMMIT",
            ),
            (
                "    steps:",
                "    permissions: {contents: write}\n    steps:",
                "only read",
            ),
            ("contents: read", "{}", "contents: read"),
            (
                "persist-credentials: false",
                "fetch-depth: 2",
                "persist-credentials",
            ),
            ("timeout-minutes", "name", "timeout-minutes"),
        ] {
            std::fs::write(workspace.path(file), right.replace(has, instead)).unwrap();
            let found = pins().unwrap_err();
            assert!(found.contains(remedy), "{instead}: {found}");
        }
    }
}
