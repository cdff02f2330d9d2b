//! Two network namespaces with a virtual cable between, for peers that work on packets. They live as long as the
//! processes that hold them, so nothing stays behind.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::perf::process::{Inside, Running, Site};

/// Addresses at the two ends of the cable: client, server.
pub(super) const CABLE: [&str; 2] = ["10.98.0.1", "10.98.0.2"];
/// Addresses at the two ends of the tunnel.
pub(super) const TUNNEL: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

/// See the module.
pub(crate) struct Namespaces {
    /// What `nsenter` is told to be in the client's.
    pub(crate) client: String,
    /// The same for the server's.
    pub(crate) server: String,
    /// The holders.
    pub(crate) running: Vec<Running>,
}

/// Whether namespaces can be made here.
///
/// # Errors
/// Why not, for the report.
pub(crate) fn available() -> anyhow::Result<()> {
    for tool in ["ip", "unshare", "nsenter"] {
        ensure!(super::on_path(tool).is_some(), "{tool} is not installed");
    }
    let made = Command::new("unshare").args(["--net", "true"]).output()?;
    ensure!(
        made.status.success(),
        "network namespaces need root: {}",
        String::from_utf8_lossy(&made.stderr).trim()
    );
    Ok(())
}

impl Namespaces {
    /// Makes both, with nothing between them.
    ///
    /// # Errors
    /// The kernel refuses a step.
    pub(crate) fn apart(site: &Site) -> anyhow::Result<Self> {
        let hold = |name: &str| -> anyhow::Result<(String, Running)> {
            let args = ["--net", "sleep", "86400"].map(str::to_owned);
            let holder = site.spawn(name, Inside::Host, Path::new("unshare"), &args)?;
            let path = format!("/proc/{}/ns/net", holder.id());
            let ours = fs::read_link("/proc/self/ns/net")?;
            site.wait_for("a network namespace", || {
                fs::read_link(&path).is_ok_and(|theirs| theirs != ours)
            })?;
            Ok((format!("--net={path}"), holder))
        };
        let (client, first) = hold("client-namespace")?;
        let (server, second) = hold("server-namespace")?;
        Ok(Self {
            client,
            server,
            running: vec![first, second],
        })
    }

    /// Makes both and connects them.
    ///
    /// # Errors
    /// The kernel refuses a step.
    pub(super) fn new(site: &Site) -> anyhow::Result<Self> {
        let made = Self::apart(site)?;
        let far = made
            .running
            .last()
            .context("both are held")?
            .id()
            .to_string();
        made.run(
            &made.client,
            &[
                "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns",
                &far,
            ],
        )?;
        for (namespace, address) in [(&made.client, CABLE[0]), (&made.server, CABLE[1])] {
            let network = format!("{address}/24");
            made.run(
                namespace,
                &["ip", "address", "add", &network, "dev", "cable"],
            )?;
            made.run(namespace, &["ip", "link", "set", "cable", "up"])?;
            made.run(namespace, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }

    /// Runs a command inside one of them.
    ///
    /// # Errors
    /// What it printed.
    pub(crate) fn run(&self, namespace: &str, command: &[&str]) -> anyhow::Result<()> {
        let output = Command::new("nsenter")
            .arg(namespace)
            .arg("--")
            .args(command)
            .output()
            .context("starting nsenter")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{}: {}", command.join(" "), said.trim());
        }
        Ok(())
    }
}
