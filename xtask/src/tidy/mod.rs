//! `cargo xtask tidy`: checks that no compiler does. Each file is one check; all checks report all their findings.

mod claims;
mod dependencies;
mod documents;
mod ebpf;
mod logs;
mod monitoring;
mod sources;

use anyhow::bail;

use crate::docs::{packages, promises};
use crate::workspace::Workspace;

/// Most findings printed; more are usually one mistake repeated.
const SHOWN_MAX: usize = 100;

/// Runs all checks.
///
/// # Errors
/// A file cannot be read, or there are findings, which are printed one per line.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let findings = findings(workspace)?;
    for finding in findings.iter().take(SHOWN_MAX) {
        println!("  {finding}");
    }
    match findings.len() {
        0 => Ok(()),
        count if count > SHOWN_MAX => bail!("{count} findings, the first {SHOWN_MAX} shown above"),
        count => bail!("{count} findings, see above"),
    }
}

fn findings(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    all.extend(sources::check(workspace)?);
    all.extend(dependencies::check(workspace)?);
    all.extend(documents::check(workspace)?);
    all.extend(ebpf::check(workspace)?);
    all.extend(logs::check(workspace)?);
    all.extend(claims::check(workspace)?);
    all.extend(monitoring::check(workspace)?);
    all.extend(promises::check(workspace)?);
    all.extend(packages::check(workspace)?);
    Ok(all)
}

/// Writes a small repository for the tests of the checks.
#[cfg(test)]
pub(crate) fn sample(files: &[(&str, &str)]) -> (tempfile::TempDir, Workspace) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let workspace = Workspace::at(folder.path());
    (folder, workspace)
}
