//! Installs and purges the package in a small Debian of its own, which is the host's also where the package is for another processor.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use walkdir::WalkDir;

use super::{Arch, Release, TOOL, deb, tool_path};
use crate::debian;
use crate::steps::{Outcome, in_ci, output_of, stdout_of};
use crate::workspace::Workspace;

/// Folders that dpkg itself changes.
const DPKG: &[&str] = &[
    "var/lib/dpkg",
    "var/log",
    "var/cache",
    "proc",
    "dev",
    "sys",
    "run",
];

/// Where the emulator of another processor is.
const EMULATOR: &str = "tmp/emulator";

/// Files after the installation, with their rights.
const FILES: &[(&str, u32)] = &[
    ("usr/bin/adit", 0o755),
    ("usr/lib/systemd/system/adit-server.service", 0o644),
    ("usr/lib/systemd/system/adit-server.socket", 0o644),
    ("usr/lib/systemd/system/adit-agent.service", 0o644),
    ("etc/adit", 0o750),
    ("etc/adit/server.toml", 0o640),
    ("etc/adit/agent.toml", 0o640),
    ("usr/share/man/man1/adit.1.gz", 0o644),
    ("usr/share/man/man1/adit-server.1.gz", 0o644),
    ("usr/share/bash-completion/completions/adit", 0o644),
    ("usr/share/zsh/vendor-completions/_adit", 0o644),
    ("usr/share/fish/vendor_completions.d/adit.fish", 0o644),
    ("usr/share/doc/adit/copyright", 0o644),
];

/// Installs it, looks at it, and purges it.
///
/// # Errors
/// Something is missing after the installation, or left after the purge.
pub(super) fn run(
    workspace: &Workspace,
    release: &Release,
    arch: Arch,
    out: &Path,
    trial: &Path,
) -> anyhow::Result<Outcome> {
    let root = trial.join("debian");
    match debian::install(workspace, &[], &root) {
        Ok(()) => (),
        // CI has a network; a laptop on a train has none.
        Err(error) if in_ci() => return Err(error),
        Err(error) => {
            return Ok(Outcome::Skipped(format!(
                "no Debian to try it in: {error:#}"
            )));
        }
    }
    let name = release.name(arch, deb::ENDING);
    let mut field = Command::new("dpkg-deb");
    field.arg("--field").arg(out.join(&name));
    let named = stdout_of(field.arg("Architecture"), TOOL)?;
    ensure!(
        named.trim() == arch.name(),
        "the package for {} names the processor {named}",
        arch.name()
    );
    fs::copy(out.join(&name), root.join("tmp").join(&name))?;
    let emulator = match arch.emulator() {
        Some(emulator) => {
            dpkg(&root, &["--add-architecture", arch.name()])?;
            let file = tool_path(&emulator).with_context(|| format!("find {emulator}"))?;
            fs::copy(file, root.join(EMULATOR))?;
            Some(Path::new("/").join(EMULATOR))
        }
        None => None,
    };
    let before = files(&root)?;
    dpkg(&root, &["--install", &format!("/tmp/{name}")])?;
    let group = group(&root)?.context("the installation makes no group adit")?;
    for (path, mode) in FILES {
        let metadata = fs::metadata(root.join(path)).with_context(|| format!("look at {path}"))?;
        let found = metadata.permissions().mode() & 0o7777;
        ensure!(
            found == *mode,
            "{path} has the mode {found:o}, not {mode:o}"
        );
        let owner = if path.starts_with("etc/adit") {
            group
        } else {
            0
        };
        ensure!(
            metadata.uid() == 0 && metadata.gid() == owner,
            "{path} is owned by {}:{}",
            metadata.uid(),
            metadata.gid()
        );
    }
    let mut adit = inside(&root);
    adit.args(emulator).args(["/usr/bin/adit", "--version"]);
    let version = stdout_of(&mut adit, TOOL)?;
    ensure!(
        version.contains(&release.version),
        "the installed adit has the version {version}"
    );
    let user = stdout_of(inside(&root).args(["getent", "passwd", "adit"]), TOOL)?;
    ensure!(
        user.contains("/nologin"),
        "the user adit can log in: {user}"
    );
    let verified = stdout_of(inside(&root).args(["dpkg", "--verify", "adit"]), TOOL)?;
    ensure!(verified.is_empty(), "dpkg finds changes: {verified}");
    for entry in WalkDir::new(root.join("etc/systemd")) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        ensure!(!name.starts_with("adit"), "{name} was enabled");
    }
    dpkg(&root, &["--remove", "adit"])?;
    ensure!(
        root.join("etc/adit/server.toml").is_file(),
        "the configuration went with the removal, before the purge"
    );
    dpkg(&root, &["--purge", "adit"])?;
    let after = files(&root)?;
    let left: Vec<&PathBuf> = after.difference(&before).collect();
    ensure!(left.is_empty(), "the purge leaves {left:?}");
    ensure!(
        self::group(&root)?.is_none(),
        "the purge leaves the group adit"
    );
    let status = stdout_of(inside(&root).args(["getent", "passwd"]), TOOL)?;
    ensure!(!status.contains("adit"), "the purge leaves the user adit");
    fs::remove_dir_all(&root)?;
    Ok(Outcome::Done)
}

fn inside(root: &Path) -> Command {
    let mut chroot = Command::new("chroot");
    chroot
        .arg(root)
        .env("LC_ALL", "C")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    chroot
}

fn dpkg(root: &Path, args: &[&str]) -> anyhow::Result<()> {
    output_of(inside(root).arg("dpkg").args(args), TOOL).map(drop)
}

/// The group adit, if there is one.
fn group(root: &Path) -> anyhow::Result<Option<u32>> {
    let groups = fs::read_to_string(root.join("etc/group"))?;
    let line = groups.lines().find_map(|line| line.strip_prefix("adit:"));
    let id = line.and_then(|line| line.split(':').nth(1));
    Ok(id.map(str::parse).transpose()?)
}

/// All files, folders and links, but those of dpkg and backups of the list of users.
fn files(root: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut all = BTreeSet::new();
    let entries = WalkDir::new(root)
        .into_iter()
        .filter_entry(|entry| !DPKG.iter().any(|folder| entry.path() == root.join(folder)));
    for entry in entries {
        let entry = entry?;
        let is_backup = entry.path().to_string_lossy().ends_with('-');
        if !is_backup {
            all.insert(entry.path().strip_prefix(root)?.to_path_buf());
        }
    }
    Ok(all)
}
