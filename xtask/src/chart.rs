//! `cargo xtask chart`: the Helm chart below `deploy/chart`, and what is made from it: the table of values in its README, and by
//! `xtask/scripts/chart.sh` the manifests below `deploy/manifests`.

mod values;

use std::fs;

use anyhow::{Context as _, ensure};

use crate::script;
use crate::steps::Outcome;
use crate::workspace::Workspace;

/// What to do with the files that are made.
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct Args {
    /// Compare them with what the chart says now, and write nothing.
    #[arg(long)]
    check: bool,
}

/// Lints and renders the chart with all values, and writes or compares what is made from it.
///
/// # Errors
/// A combination does not do what it should, a command line of a rendering is none of `adit`'s, or a file differs.
pub(crate) fn run(workspace: &Workspace, args: Args) -> anyhow::Result<Outcome> {
    let (page, file) = (values::readme(workspace)?, workspace.path(values::README));
    if !args.check {
        fs::write(&file, &page).with_context(|| format!("write {}", values::README))?;
    }
    ensure!(
        fs::read_to_string(&file)? == page,
        "{} is not what the chart says: `cargo xtask chart` writes it anew",
        values::README
    );
    values::matches_schema(workspace)?;
    let mode = if args.check { "check" } else { "write" };
    script::outcome(script::command(workspace, "chart").arg(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_values_is_current() {
        let workspace = Workspace::here().unwrap();
        let page = values::readme(&workspace).unwrap();
        assert_eq!(workspace.text(values::README).unwrap().unwrap(), page);
        values::matches_schema(&workspace).unwrap();
    }
}
