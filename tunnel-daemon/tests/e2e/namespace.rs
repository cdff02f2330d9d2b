//! A network with an endpoint in it that only a tunnel reaches.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::process::Process;

/// Set in the process that is the endpoint.
const ROLE: &str = "ADIT_TEST_ENDPOINT";
pub(crate) const BODY: &str = "through the tunnel";

/// It goes with the process that holds it.
pub(crate) struct Namespace {
    holder: Child,
    _endpoint: Process,
}

impl Namespace {
    /// With a cable to this host, and an endpoint at 10.77.0.1:8080, to which no route leads from
    /// here.
    pub(crate) fn new(dir: &Path, cable: [Ipv4Addr; 2]) -> Self {
        let [here, there] = cable;
        let script =
            "ip link set lo up && ip address add 10.77.0.1/32 dev lo && echo up && exec sleep 600";
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", script])
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
        let this = std::env::current_exe().expect("a program");
        let endpoint = format!(
            "export {ROLE}=1; exec nsenter --net=/proc/{pid}/ns/net {} --exact namespace::endpoint --nocapture",
            this.display()
        );
        let endpoint = Process::service(
            "endpoint",
            Path::new("sh"),
            &["-c".to_owned(), endpoint],
            dir,
        );
        Self {
            holder,
            _endpoint: endpoint,
        }
    }

    /// Runs our program in it.
    pub(crate) fn adit(&self, name: &str, args: &[String], dir: &Path) -> Process {
        let mut all = vec![
            format!("--net=/proc/{}/ns/net", self.holder.id()),
            env!("CARGO_BIN_EXE_adit").to_owned(),
        ];
        all.extend_from_slice(args);
        Process::service(name, Path::new("nsenter"), &all, dir)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.holder.kill().ok();
        self.holder.wait().ok();
    }
}

/// No test but where a test wants an endpoint.
#[test]
fn endpoint() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let listener = TcpListener::bind("10.77.0.1:8080").unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut head = [0; 4096];
        let Ok(_bytes) = stream.read(&mut head) else {
            continue;
        };
        let length = BODY.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{BODY}"
        );
        stream.write_all(answer.as_bytes()).ok();
    }
}
