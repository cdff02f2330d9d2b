//! A small Debian with systemd, in which packages and pages are tried.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::steps::{output_of, run_command};
use crate::workspace::{Workspace, fresh};

/// The distribution, and what a server of it has that a minimal installation lacks.
const SUITE: &str = "bookworm";
const PACKAGES: &str = "systemd,systemd-sysv,dbus,curl,python3,procps";
const MIRROR: &str = "http://deb.debian.org/debian";
/// Longest time to fetch and unpack it.
const FETCH: Duration = Duration::from_secs(15 * 60);
/// Longest time to copy it.
const COPY: Duration = Duration::from_secs(5 * 60);

/// Makes one in a folder of which an older one goes, with further packages. It is fetched once, and copied.
///
/// # Errors
/// There is no network, or a tool is missing.
pub(crate) fn install(workspace: &Workspace, packages: &[&str], to: &Path) -> anyhow::Result<()> {
    let packages = [&[PACKAGES], packages].concat().join(",");
    // Called after what is in it.
    let name = format!("debian-{SUITE}-{}", packages.replace(',', "-"));
    let base = workspace.target().join(name);
    if !base.exists() {
        let partial = base.with_extension("partial");
        fresh(&partial)?;
        let mut debootstrap = Command::new("debootstrap");
        debootstrap
            .args(["--variant=minbase", &format!("--include={packages}"), SUITE])
            .arg(&partial)
            .arg(MIRROR)
            .env("LC_ALL", "C");
        output_of(&mut debootstrap, FETCH)?;
        fs::rename(&partial, &base)?;
    }
    fresh(to)?;
    let mut cp = Command::new("cp");
    cp.args(["--archive", "--reflink=auto", "--no-target-directory"]);
    run_command(cp.args([&base, to]), COPY)
}
