//! `cargo xtask perf --nightly`: every scenario of the repository, one after the other, into one folder.

use std::fs;

use anyhow::Context as _;

use super::programs::Programs;
use super::{Args, measure};
use crate::steps::Steps;
use crate::workspace::Workspace;

/// The short form of another one.
const LEFT_OUT: &str = "quick";

/// Runs the command. A scenario that fails does not stop the next ones.
///
/// # Errors
/// A scenario is not valid, or nothing of one could be measured.
pub(super) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    // Before anything is measured: a mistake in the last one would be found hours later.
    let mut scenarios = Vec::new();
    for name in names(workspace)? {
        scenarios.push((args.of_name(workspace, &name)?, name));
    }
    let programs = Programs::new(workspace, args.adit.clone())?;
    let folder = programs.out.join("nightly");
    // What another commit left there must not be taken for this one's.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    let mut steps = Steps::new();
    let mut report = String::new();
    for (scenario, name) in &scenarios {
        steps.run(name, || {
            let out = folder.join(name);
            fs::create_dir_all(&out)?;
            let (_results, table) = measure(&programs, scenario, &out)?;
            report.push_str(&format!("## {name}\n\n{table}\n"));
            // At once: a night that ends early leaves what it has.
            fs::write(folder.join("perf.md"), &report)?;
            Ok(())
        });
    }
    steps.finish()
}

/// The scenarios that are run, in order.
fn names(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let files = workspace.files("perf/scenarios")?;
    let names = files.iter().filter_map(|file| {
        let name = file.strip_prefix("perf/scenarios/")?;
        name.strip_suffix(".toml")
    });
    let wanted = names.filter(|name| *name != LEFT_OUT);
    Ok(wanted.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_but_the_short_form_is_run() {
        let workspace = Workspace::here().unwrap();
        let names = names(&workspace).unwrap();
        let files = fs::read_dir(workspace.path("perf/scenarios")).unwrap();
        assert_eq!(names.len(), files.count() - 1);
        for name in [
            "agents", "engines", "fleet", "full", "scale", "wan", "wan-loss",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
        assert!(!names.iter().any(|name| name == LEFT_OUT));
    }
}
