//! A node: a network namespace with a kubelet and a pod, which only a tunnel reaches.

use std::io::Read as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::cluster::Cluster;
use crate::process::Process;
use crate::wait::{secs, until};

/// Start of each pod's answer.
pub(crate) const BODY: &str = "through the tunnel to ";

/// A node. Its namespace ends with the holder process.
pub(crate) struct Node {
    holder: Child,
    /// Address of its kubelet and pods. This host has no route to it.
    pub(crate) address: Ipv4Addr,
    /// Address at which its agents reach this host.
    pub(crate) host: Ipv4Addr,
    _programs: Process,
}

impl Node {
    /// Starts node `number`, counted from 0, with a veth pair to this host.
    pub(crate) fn start(cluster: &Cluster, number: usize) -> Self {
        let address = Cluster::node_address(number);
        let [here, there] = cluster.cables[number];
        let script = format!(
            "ip link set lo up && ip address add {address}/32 dev lo && echo up && exec sleep 900"
        );
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut up = [0; 2];
        holder
            .stdout
            .as_mut()
            .expect("it has one")
            .read_exact(&mut up)
            .expect("a network");
        let pid = holder.id().to_string();
        let outside = format!("adit-{pid}");
        let laying = format!(
            "ip link add {outside} type veth peer name inside netns {pid} && ip address add {here}/30 dev {outside} \
             && ip link set {outside} up && nsenter --net=/proc/{pid}/ns/net sh -c \
             'ip address add {there}/30 dev inside && ip link set inside up'"
        );
        let laid = Command::new("sh").args(["-c", &laying]).status();
        assert!(laid.is_ok_and(|status| status.success()), "a cable");
        let files = &cluster.files;
        let args = [
            format!("--net=/proc/{pid}/ns/net"),
            cluster.program("node").display().to_string(),
            format!("--address={address}"),
            format!("--cert={}", files.cert("node").display()),
            format!("--key={}", files.key("node").display()),
            format!("--client-ca={}", files.ca_file().display()),
            format!("--containers={}", cluster.containers().display()),
        ];
        let name = format!("node-{}", number + 1);
        let programs = Process::service(&name, Path::new("nsenter"), &args, cluster.dir.path());
        let log = cluster.path(&format!("{name}.log"));
        until("a node that serves", secs(20), || {
            std::fs::read_to_string(&log)
                .ok()
                .filter(|log| log.contains("serving"))
        });
        Self {
            holder,
            address,
            host: here,
            _programs: programs,
        }
    }

    /// Runs a program on the node.
    pub(crate) fn run(&self, name: &str, program: &Path, args: &[String], dir: &Path) -> Process {
        let mut all = vec![
            format!("--net=/proc/{}/ns/net", self.holder.id()),
            program.display().to_string(),
        ];
        all.extend_from_slice(args);
        Process::service(name, Path::new("nsenter"), &all, dir)
    }

    /// The words before a shell command in the node's network.
    pub(crate) fn enters(&self) -> String {
        format!("nsenter --net=/proc/{}/ns/net", self.holder.id())
    }

    /// An `nsenter` command for the node's network, to which a program is appended.
    pub(crate) fn entering(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id()));
        command
    }

    /// Runs a host command in the node's network.
    pub(crate) fn command(&self, words: &[&str]) {
        let status = self.entering().args(words).status();
        assert!(status.is_ok_and(|status| status.success()), "{words:?}");
    }

    /// Runs our program on the node.
    pub(crate) fn adit(&self, name: &str, args: &[String], dir: &Path) -> Process {
        self.run(name, Path::new(env!("CARGO_BIN_EXE_adit")), args, dir)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.holder.kill().ok();
        self.holder.wait().ok();
    }
}
