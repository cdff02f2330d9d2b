//! `adit demo --redirect`: a plain `curl` in a cgroup of its own, whose connections the kernel sends through the tunnel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::process::Command;

use super::checks::OPEN_TUNNELS;
use super::counters::Counters;
use super::targets::GREETING;
use super::world::World;
use crate::ebpf::lacks;
use crate::ebpf_flags;
use crate::run::wait_until;
use adit_net::cgroup;

/// For the tunnel to end behind its client.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// A cgroup below our own, gone with the value.
pub(super) struct Captured(PathBuf);

impl Captured {
    /// Makes it.
    ///
    /// # Errors
    /// There is no cgroup2 here, or it may not be written to; or there is no redirect in this binary.
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

    /// Where a process writes its id to become captured.
    pub(super) fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::debug!(%error, cgroup = %self.0.display(), "left behind");
        }
    }
}

/// A captured `curl` without any setting gets the web page, and the kernel says that it redirected it.
pub(super) async fn page(world: &World, captured: &Captured) -> anyhow::Result<String> {
    if world.series("adit_redirect_state{state=\"active\"}") != 1 {
        bail!("this host does not allow the redirect: {}", lacks());
    }
    let (redirected, before) = (world.server.redirected(), Counters::of(world));
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
    ensure!(
        output.status.code() != Some(127),
        "curl is not installed: {}",
        said.trim()
    );
    ensure!(output.status.success(), "curl: {}", said.trim());
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(text == GREETING, "answer {text:?} instead of {GREETING:?}");
    ensure!(
        world.server.redirected() == redirected + 1,
        "curl went past the tunnel: the kernel has redirected nothing"
    );
    // By its counters: nobody knows when the tunnel of another process has moved something and is still open.
    wait_until(END_PATIENCE, || world.series(OPEN_TUNNELS) == 0).await;
    let ways = Counters::of(world).since(before);
    Ok(format!(
        "curl http://{}/ without a proxy, {:?}; {ways}",
        world.web,
        text.trim_end()
    ))
}
