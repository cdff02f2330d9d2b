//! The Debian package: binary, units, configuration, manual pages and completions. It starts no service, as a service needs
//! certificates first.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use walkdir::WalkDir;

use super::image::place;
use super::{Arch, Release, Site, TOOL, names};
use crate::steps::{run_command, stdout_of};
use crate::workspace::fresh;

/// What the artefact is called behind version and processor.
pub(super) const ENDING: &str = ".deb";

const UNITS: &[&str] = &[
    "adit-server.service",
    "adit-server.socket",
    "adit-agent.service",
];
const CONFIGURATION: &[&str] = &["server.toml", "agent.toml"];
/// Completions: the shell, and where it looks for them.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/adit"),
    ("zsh", "usr/share/zsh/vendor-completions/_adit"),
    ("fish", "usr/share/fish/vendor_completions.d/adit.fish"),
];
const DOC: &str = "usr/share/doc/adit";

/// After files were unpacked. Keys and configuration are for root and the group.
const POSTINST: &str = r#"#!/bin/sh
set -e
if [ "$1" = configure ]; then
  if ! getent passwd adit >/dev/null; then
    useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin --comment "Adit" adit
  fi
  for file in /etc/adit /etc/adit/server.toml /etc/adit/agent.toml; do
    if [ -e "$file" ] && [ "$(stat --format=%G "$file")" = root ]; then chgrp adit "$file"; fi
  done
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
"#;
/// Before files go. An upgrade leaves services running: a restart is the operator's to time.
const PRERM: &str = r#"#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl disable --now adit-server.socket adit-server.service adit-agent.service || true
fi
"#;
/// After files went.
const POSTRM: &str = r#"#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
if [ "$1" = purge ] && getent passwd adit >/dev/null; then userdel adit; fi
"#;

/// Makes the package.
///
/// # Errors
/// A file is missing, the binary does not print what it is asked for, or dpkg-deb fails.
pub(super) fn make(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    program: &Path,
    licences: &Path,
) -> anyhow::Result<()> {
    let root = site.work.join("deb");
    fresh(&root)?;
    fill(site, release, arch, program, licences, &root)?;
    let bytes = settle(&root)?;
    control(release, arch, &root, bytes)?;
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.args(["--root-owner-group", "--threads-max=1", "-Zxz", "--build"])
        .arg(&root)
        .arg(site.out.join(release.name(arch, ENDING)))
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        .stdout(std::process::Stdio::null());
    run_command(&mut dpkg, TOOL)?;
    fs::remove_dir_all(&root)?;
    Ok(())
}

/// Puts all files into place.
fn fill(
    site: &Site<'_>,
    release: &Release,
    arch: Arch,
    program: &Path,
    licences: &Path,
    root: &Path,
) -> anyhow::Result<()> {
    let deploy = site.sources.path("deploy/systemd");
    place(program, &root.join("usr/bin/adit"), 0o755)?;
    for unit in UNITS {
        let to = root.join("usr/lib/systemd/system").join(unit);
        place(&deploy.join(unit), &to, 0o644)?;
    }
    for file in CONFIGURATION {
        place(&deploy.join(file), &root.join("etc/adit").join(file), 0o640)?;
    }
    let ebpf = root.join(DOC).join("examples/adit-ebpf.conf");
    place(&deploy.join("adit-ebpf.conf"), &ebpf, 0o644)?;
    for (shell, path) in COMPLETIONS {
        let mut adit = arch.run(program);
        let script = stdout_of(adit.args(["completion", shell]), TOOL)?;
        let path = root.join(path);
        fs::create_dir_all(path.parent().context("a file is in a folder")?)?;
        fs::write(path, script)?;
    }
    let pages = root.join("usr/share/man/man1");
    fs::create_dir_all(&pages)?;
    run_command(arch.run(program).arg("man").arg(&pages), TOOL)?;
    for page in names(&pages)? {
        compress(&pages.join(page))?;
    }
    let doc = root.join(DOC);
    fs::write(doc.join("copyright"), copyright(release))?;
    place(licences, &doc.join("LICENSES.txt"), 0o644)?;
    compress(&doc.join("LICENSES.txt"))?;
    let changes = site.sources.path("CHANGELOG.md");
    place(&changes, &doc.join("changelog"), 0o644)?;
    compress(&doc.join("changelog"))
}

fn copyright(release: &Release) -> String {
    format!(
        "Adit {}\n\nCopyright: the contributors of Adit\nLicense: Apache-2.0, see /usr/share/common-licenses/Apache-2.0\n\n\
         The binary is static. LICENSES.txt.gz beside this file names what it holds, with all licences.\n",
        release.version
    )
}

/// Without name and time.
fn compress(file: &Path) -> anyhow::Result<()> {
    let mut gzip = Command::new("gzip");
    run_command(gzip.args(["--no-name", "--best"]).arg(file), TOOL)
}

/// Gives folders and files the rights that they have after the installation, whatever the umask is; returns their size.
fn settle(root: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in WalkDir::new(root) {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let mode = metadata.permissions().mode();
        let is_closed = entry.path().starts_with(root.join("etc/adit"));
        let mode = match (metadata.is_dir(), is_closed) {
            (true, true) => 0o750,
            (true, false) => 0o755,
            (false, true) => 0o640,
            (false, false) if mode & 0o100 != 0 => 0o755,
            (false, false) => 0o644,
        };
        fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode))?;
        if metadata.is_file() {
            bytes += metadata.len();
        }
    }
    Ok(bytes)
}

fn control(release: &Release, arch: Arch, root: &Path, bytes: u64) -> anyhow::Result<()> {
    let folder = root.join("DEBIAN");
    let sums = md5sums(root)?;
    fs::create_dir_all(&folder)?;
    let text = format!(
        "Package: adit\nVersion: {}\nArchitecture: {}\nMaintainer: The contributors of Adit\nInstalled-Size: {}\n\
         Depends: passwd\nSection: net\nPriority: optional\n\
         Description: Konnectivity data plane: server and agent in one binary\n \
         Tunnels from a Kubernetes control plane to its nodes, on the wire of Konnectivity.\n \
         No service is started: make certificates first, see adit-pki(1).\n",
        release.version,
        arch.name(),
        bytes.div_ceil(1024)
    );
    let conffiles: String = CONFIGURATION
        .iter()
        .map(|file| format!("/etc/adit/{file}\n"))
        .collect();
    for (name, text, mode) in [
        ("control", text.as_str(), 0o644),
        ("conffiles", conffiles.as_str(), 0o644),
        ("md5sums", sums.as_str(), 0o644),
        ("postinst", POSTINST, 0o755),
        ("prerm", PRERM, 0o755),
        ("postrm", POSTRM, 0o755),
    ] {
        let file = folder.join(name);
        fs::write(&file, text)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
    }
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// What `dpkg --verify` compares with.
fn md5sums(root: &Path) -> anyhow::Result<String> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in WalkDir::new(root).sort_by_file_name() {
        let entry = entry?;
        let below = entry.path().strip_prefix(root)?;
        if entry.file_type().is_file() && !below.starts_with("etc") {
            files.push(below.to_path_buf());
        }
    }
    let mut md5sum = Command::new("md5sum");
    stdout_of(md5sum.current_dir(root).args(files), TOOL)
}
