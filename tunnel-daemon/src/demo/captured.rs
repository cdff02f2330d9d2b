//! `adit demo --redirect`: a plain `curl` in a cgroup of its own, whose connections the kernel sends through the tunnel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail, ensure};
use tokio::process::Command;

use super::checks::no_tunnel_open;
use super::paths::Paths;
use super::targets::GREETING;
use super::world::World;
use crate::ebpf::lacks;
use crate::ebpf_flags;
use adit_host::cgroup;

/// A cgroup below this process's own, removed on drop. Connections of the processes in it are captured.
pub(super) struct CapturedCgroup(PathBuf);

impl CapturedCgroup {
    /// Creates the cgroup.
    ///
    /// # Errors
    /// cgroup2 is not mounted or not writable, or this binary has no redirect.
    pub(super) fn make() -> anyhow::Result<Self> {
        ebpf_flags::check("--redirect")?;
        let own = cgroup::own().map_err(anyhow::Error::msg)?;
        let path = own.join(format!("adit-demo-{}", std::process::id()));
        fs::create_dir(&path)
            .with_context(|| format!("a cgroup for captured processes, {}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// File to which a process writes its id to be captured.
    pub(super) fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for CapturedCgroup {
    fn drop(&mut self) {
        // A process that is still in it keeps it.
        let _left = fs::remove_dir(&self.0);
    }
}

/// Checks that a captured `curl` without any proxy setting gets the web page, and that the kernel counts a redirect.
pub(super) async fn page(world: &World, captured: &CapturedCgroup) -> anyhow::Result<String> {
    if world.series("adit_redirect_state{state=\"active\"}") != 1 {
        bail!("this host does not allow the redirect: {}", lacks());
    }
    let (redirected, before) = (world.server.redirected(), Paths::of(world));
    let output = Command::new("sh")
        .args([
            "-c",
            "echo $$ > \"$0\" && exec curl --silent --show-error --max-time 20 \"$1\"",
        ])
        .arg(captured.processes())
        .arg(format!("http://{}/", world.web))
        .env_remove("http_proxy")
        .env_remove("ALL_PROXY")
        .env_remove("all_proxy")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("starting sh")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    ensure!(
        output.status.code() != Some(127),
        "curl is not installed: {said}"
    );
    ensure!(output.status.success(), "curl: {said}");
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(text == GREETING, "answer {text:?} instead of {GREETING:?}");
    ensure!(
        world.server.redirected() == redirected + 1,
        "curl went past the tunnel: the kernel has redirected nothing"
    );
    no_tunnel_open(world).await;
    let (web, text) = (world.web, text.trim_end());
    let (_on_lanes, paths) = Paths::of(world).since(before);
    Ok(format!(
        "curl http://{web}/ without a proxy, {text:?}; {paths}"
    ))
}
