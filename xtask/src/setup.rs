//! `cargo xtask setup`: installs the git hooks.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};

use crate::workspace::Workspace;

/// First line after the shebang: marks a hook as ours, so that it may be replaced.
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
/// Outside a git repository, when a foreign hook is in the way, or when a file cannot be written.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let folder = hook_folder(workspace)?;
    std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for (name, body) in HOOKS {
        let path = folder.join(name);
        match std::fs::read_to_string(&path) {
            Ok(old) if !old.contains(MARK) && !args.force => {
                bail!(
                    "{} is not ours: merge it by hand, or run again with --force",
                    path.display()
                )
            }
            _ => (),
        }
        std::fs::write(&path, format!("#!/bin/sh\n{MARK}\nset -e\n{body}"))
            .with_context(|| format!("write {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        println!("installed {name}");
    }
    Ok(())
}

fn hook_folder(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let out = workspace
        .command("git")
        .args(["rev-parse", "--git-path", "hooks"])
        .output()
        .context("run git")?;
    ensure!(
        out.status.success(),
        "not a git repository: {}",
        String::from_utf8_lossy(&out.stderr).trim()
    );
    let text = String::from_utf8(out.stdout).context("git gave a path that is not UTF-8")?;
    Ok(workspace.root().join(text.trim()))
}
