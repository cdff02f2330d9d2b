//! A client of the server other than kube-apiserver: upstream's client library over gRPC and mutual TLS, as OCM's programs
//! use it.
//!
//! The interop tests' Go client speaks gRPC to a unix socket. `openssl` forwards each of its connections to the server's
//! port.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

use serde_json::Value;

use crate::cluster::Cluster;
use crate::go::{self, Program};

pub(crate) struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the server at this port.
    pub(crate) fn start(cluster: &Cluster, port: u16) -> Self {
        let socket = cluster.path("client.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let files = &cluster.files;
        let mut words: Vec<String> = ["s_client", "-quiet", "-verify_return_error"]
            .map(str::to_owned)
            .to_vec();
        for (flag, value) in [
            ("-connect", format!("127.0.0.1:{port}")),
            ("-verify_ip", "127.0.0.1".to_owned()),
            ("-alpn", "h2".to_owned()),
            ("-CAfile", files.ca_file().display().to_string()),
            ("-cert", files.cert("client").display().to_string()),
            ("-key", files.key("client").display().to_string()),
        ] {
            words.extend([flag.to_owned(), value]);
        }
        thread::spawn(move || {
            for stream in listener.incoming() {
                carry(stream.expect("a connection"), &words);
            }
        });
        Self { socket }
    }

    /// Answer of a pod to an HTTP request through a tunnel to `target`.
    pub(crate) fn get(&self, target: &str) -> Option<String> {
        let output = Command::new(go::binary(Program::Peer))
            .args([
                "get",
                "--timeout=5s",
                "--path=/",
                "--target",
                target,
                "--uds",
            ])
            .arg(&self.socket)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .expect("it starts");
        let result: Value = serde_json::from_slice(&output.stdout).ok()?;
        result["body"].as_str().map(str::to_owned)
    }
}

/// Forwards a connection until the server closes it.
fn carry(stream: UnixStream, words: &[String]) {
    let copy = stream.try_clone().expect("a copy");
    let started = Command::new("openssl")
        .args(words)
        .stdin(OwnedFd::from(copy))
        .stdout(OwnedFd::from(stream))
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.expect("openssl starts");
    thread::spawn(move || child.wait());
}
