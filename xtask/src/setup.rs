//! `cargo xtask setup`: installs the git hooks.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, ensure};

use crate::workspace::Workspace;

/// First line after the shebang: marks hooks that this command wrote and may replace.
const MARK: &str = "# Installed by `cargo xtask setup`.";

const HOOKS: &[(&str, &str)] = &[
    ("pre-commit", "cargo fmt --all --check\ncargo xtask tidy\n"),
    ("pre-push", "cargo xtask ci --quick\n"),
];

/// How to treat hooks that are there.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Replace hooks that this command did not write.
    #[arg(long)]
    force: bool,
}

/// Writes the hooks into the repository's hook folder.
///
/// # Errors
/// Outside a git repository, or another hook exists, or a file cannot be written.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let hooks = workspace.git(&["rev-parse", "--git-path", "hooks"])?;
    let folder = workspace.root().join(hooks);
    std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for (name, body) in HOOKS {
        let path = folder.join(name);
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        ensure!(
            old.is_empty() || old.contains(MARK) || args.force,
            "{} is not ours: merge it by hand, or run again with --force",
            path.display()
        );
        std::fs::write(&path, format!("#!/bin/sh\n{MARK}\nset -e\n{body}"))
            .with_context(|| format!("write {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        println!("installed {name}");
    }
    Ok(())
}
