//! `adit demo --redirect`: a plain `curl` in a cgroup of its own, whose connections the kernel sends through the tunnel.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::process::Command;

use super::captured_cgroup::CapturedCgroup;
use super::counters::Counters;
use super::targets::GREETING;
use super::world::{OPEN_TUNNELS, World};
use crate::ebpf::lacks;
use adit_host::wait::wait_until;

/// Time for the tunnel to end after its client has.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Checks that a captured `curl` without any proxy setting gets the web page, and that the kernel counts a redirect.
pub(super) async fn page(world: &World, captured: &CapturedCgroup) -> anyhow::Result<String> {
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
    // Uses counters: the demo cannot tell when another process's tunnel has moved bytes and is still open.
    wait_until(END_PATIENCE, || world.series(OPEN_TUNNELS) == 0).await;
    let ways = Counters::of(world).since(before);
    Ok(format!(
        "curl http://{}/ without a proxy, {:?}; {ways}",
        world.web,
        text.trim_end()
    ))
}
