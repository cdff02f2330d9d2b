//! A small Debian with systemd, in which packages and install pages are tested.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::steps::{output_of, run_command};
use crate::workspace::{Workspace, fresh};

/// The distribution, and packages of a server that a minimal installation lacks.
const SUITE: &str = "bookworm";
const PACKAGES: &str = "systemd,systemd-sysv,dbus,curl,python3,procps";
const MIRROR: &str = "http://deb.debian.org/debian";
/// Time limit to fetch and unpack it.
const FETCH: Duration = Duration::from_secs(15 * 60);
/// Time limit to copy it.
const COPY: Duration = Duration::from_secs(5 * 60);

/// Creates a Debian with further `packages` in a folder, replacing an older one. The system is fetched once and then copied.
///
/// # Errors
/// There is no network, or a tool is missing.
pub(crate) fn install(workspace: &Workspace, packages: &[&str], to: &Path) -> anyhow::Result<()> {
    let packages = [&[PACKAGES], packages].concat().join(",");
    // Named after its packages, so that other packages cause a new fetch.
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
