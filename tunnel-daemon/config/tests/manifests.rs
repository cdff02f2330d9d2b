//! Manifests in deploy/manifests: `adit` parses their command lines, and the pods match: files, probes, drain time,
//! privileges. `cargo xtask chart` sets `ADIT_MANIFESTS` to a folder, so that these tests check all renderings of the
//! chart.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use adit_config::address::BindAddress;
use adit_config::plan::{AccountMode, Drain, ShutdownPlan};
use adit_config::{Command, NodeInterfaceOptions, parse};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The committed manifests.
const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/manifests");
/// Suffixes of flags whose values name required files.
const FILES: &[&str] = &["-cert", "-key", "kubeconfig", "token-path"];
/// Time that a pod needs in addition to its drain.
const MARGIN: Duration = Duration::from_secs(2);

/// Part of a manifest, by a JSON pointer; null if missing.
fn at<'a>(value: &'a Value, pointer: &str) -> &'a Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// All pod specifications at any depth.
fn pods<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
    if value.get("containers").is_some() {
        found.push(value);
    } else if let Some(fields) = value.as_object() {
        fields.values().for_each(|field| pods(field, found));
    }
}

/// A container of `adit` in its pod.
struct Container<'a> {
    pod: &'a Value,
    spec: &'a Value,
}

/// The parts of a server's or agent's plan that the pod must match.
struct Facts {
    is_server: bool,
    health: BindAddress,
    shutdown: ShutdownPlan,
    is_ebpf: bool,
    is_netns: bool,
}

impl Container<'_> {
    /// The arguments after the kubelet's expansion of variables.
    fn args(&self) -> Vec<String> {
        let env = list(at(self.spec, "/env"));
        let mut args = Vec::new();
        for arg in list(at(self.spec, "/args")) {
            let mut arg = text(arg).to_owned();
            while let Some((before, rest)) = arg.split_once("$(") {
                let (name, after) = rest.split_once(')').expect("a variable ends");
                let variable = env.iter().find(|variable| variable["name"] == name);
                let field = at(
                    variable.expect("a variable is set"),
                    "/valueFrom/fieldRef/fieldPath",
                );
                let value = if text(field) == "status.hostIP" {
                    "192.0.2.1"
                } else {
                    "a"
                };
                arg = format!("{before}{value}{after}");
            }
            args.push(arg);
        }
        args
    }

    /// The plan of the arguments. Files that they name are created below `folder`; each must be in a volume.
    fn plan(&self, folder: &Path) -> Facts {
        let mut argv = vec!["/adit".to_owned()];
        for arg in self.args() {
            let (name, value) = arg.split_once('=').unwrap_or((&arg, ""));
            let path = value.rsplit_once("unix:").map_or(value, |(_, path)| path);
            if path.starts_with('/') {
                self.assert_mounted(path);
            }
            if FILES.iter().any(|end| name.ends_with(end)) {
                let file = folder.join(value.trim_start_matches('/'));
                fs::create_dir_all(file.parent().expect("a file has a folder")).expect("a folder");
                fs::write(&file, "").expect("a file");
                argv.push(format!("{name}={}", file.display()));
            } else {
                argv.push(arg);
            }
        }
        let parsed = parse(argv.iter().map(OsString::from), &|_name| None);
        let parsed = parsed.unwrap_or_else(|error| panic!("{}: {argv:#?}", error.message()));
        assert_eq!(parsed.warnings, Vec::<String>::new());
        match parsed.command {
            Command::Server(plan) => Facts {
                is_server: true,
                health: plan.health.clone().expect("probes have a port"),
                shutdown: plan.shutdown,
                is_ebpf: plan.transparent.redirect.is_some()
                    || plan.account.mode != AccountMode::Off,
                is_netns: argv.iter().any(|arg| arg.starts_with("--redirect-netns")),
            },
            Command::Agent(plan) => Facts {
                is_server: false,
                health: plan.health.clone().expect("probes have a port"),
                shutdown: plan.shutdown,
                is_ebpf: plan.redirect.is_some() || plan.account.mode != AccountMode::Off,
                is_netns: argv.iter().any(|arg| arg.starts_with("--redirect-netns")),
            },
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that a volume mount contains the path.
    fn assert_mounted(&self, path: &str) {
        let mounts = list(at(self.spec, "/volumeMounts"));
        let has = |mount: &&Value| Path::new(path).starts_with(text(&mount["mountPath"]));
        let mount = mounts.iter().find(has);
        let mount = mount.unwrap_or_else(|| panic!("{path} is in no volume"));
        let volumes = list(at(self.pod, "/volumes"));
        let volume = volumes
            .iter()
            .find(|volume| volume["name"] == mount["name"]);
        let volume = volume.unwrap_or_else(|| panic!("{mount} has no volume"));
        // A Secret with selected items must have an item with the file name of the flag.
        let items = list(volume.pointer("/secret/items").unwrap_or(&Value::Null));
        let name = Path::new(path)
            .file_name()
            .and_then(OsStr::to_str)
            .expect("a file has a name");
        assert!(
            items.is_empty() || items.iter().any(|item| item["path"] == name),
            "{path} is none of {items:?}"
        );
    }

    /// Probes use the health port and its address.
    fn probes_fit(&self, facts: &Facts) {
        let paths: &[&str] = if facts.is_server {
            &["/healthz", "/healthz"]
        } else {
            &["/healthz", "/readyz"]
        };
        for (probe, path) in ["livenessProbe", "readinessProbe"].iter().zip(paths) {
            let get = at(&self.spec[*probe], "/httpGet");
            assert_eq!(get["path"], *path);
            let ports = list(at(self.spec, "/ports"));
            let port = ports.iter().find(|port| port["name"] == get["port"]);
            assert_eq!(
                port.expect("a port has a name")["containerPort"],
                facts.health.port
            );
            let host = get.get("host").map(text);
            assert_eq!(host.is_some(), facts.health.is_loopback(), "{get}");
        }
    }

    /// The drain fits into the termination grace period.
    fn drain_fits(&self, facts: &Facts) {
        let grace = at(self.pod, "/terminationGracePeriodSeconds").as_u64();
        let grace = Duration::from_secs(grace.expect("a pod has time to end"));
        let before = at(self.spec, "/lifecycle/preStop/sleep/seconds").as_u64();
        let before = Duration::from_secs(before.unwrap_or_default());
        if let Drain::For(time) = facts.shutdown.drain {
            assert!(before + time + MARGIN <= grace, "{time:?} of {grace:?}");
        }
    }

    /// The pod has no privilege that the command line does not need.
    fn rights_fit(&self, facts: &Facts) {
        let security = at(self.spec, "/securityContext");
        assert_eq!(security["allowPrivilegeEscalation"], false);
        assert_eq!(security["readOnlyRootFilesystem"], true);
        assert_eq!(
            at(security, "/capabilities/drop"),
            &Value::from(vec!["ALL"])
        );
        let mut expected = Vec::new();
        if facts.is_ebpf {
            expected.extend(["BPF", "NET_ADMIN"]);
        }
        if facts.is_netns {
            expected.extend(["SYS_ADMIN", "SYS_PTRACE"]);
        }
        let added = list(at(security, "/capabilities/add")).iter().map(text);
        // Only kernels before 6.8 need it.
        let added: Vec<&str> = added.filter(|name| *name != "PERFMON").collect();
        assert_eq!(added, expected);
        let user = security.get("runAsUser");
        let user = user.unwrap_or_else(|| at(self.pod, "/securityContext/runAsUser"));
        let volumes = list(at(self.pod, "/volumes"));
        let is_of_node = volumes
            .iter()
            .any(|volume| volume.get("hostPath").is_some());
        let expected = if is_of_node || facts.is_ebpf {
            0
        } else {
            65532
        };
        assert_eq!(user, expected);
        let token = at(self.pod, "/automountServiceAccountToken");
        assert!(token.is_boolean() || self.pod.get("serviceAccountName").is_none());
    }
}

/// An init container of `adit` gives the node the address at which the agent listens, with this right alone. Nothing takes the
/// address away when the pod ends: its successor may have it already.
fn assert_init_containers(pod: &Value) {
    for init in list(at(pod, "/initContainers")) {
        let spec = list(at(pod, "/containers")).first().expect("an agent");
        let [of_init, of_agent] = [init, spec].map(|spec| Container { pod, spec }.args());
        let argv = std::iter::once("/adit".to_owned()).chain(of_init);
        let parsed = parse(argv.map(OsString::from), &|_name| None).expect("the flags are right");
        let Command::NodeInterface(NodeInterfaceOptions::Add(added)) = parsed.command else {
            panic!("{:?}", parsed.command)
        };
        let bind = format!("--bind-address={}", added.address);
        assert!(of_agent.contains(&bind), "{of_agent:?}");
        assert!(of_agent.iter().any(|arg| arg.starts_with("--target-from=")));
        assert_eq!(pod["hostNetwork"], true);
        let security = at(init, "/securityContext");
        let capabilities = json!({"drop": ["ALL"], "add": ["NET_ADMIN"]});
        assert_eq!(security["capabilities"], capabilities);
        assert_eq!(security["allowPrivilegeEscalation"], false);
        assert_eq!(security["readOnlyRootFilesystem"], true);
        assert_eq!(at(spec, "/lifecycle"), &Value::Null);
    }
}

fn files() -> Vec<PathBuf> {
    let folder = env::var_os("ADIT_MANIFESTS").map_or_else(|| MANIFESTS.into(), PathBuf::from);
    let files = fs::read_dir(&folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path());
    let mut files: Vec<PathBuf> = files
        .filter(|file| file.extension().is_some_and(|ending| ending == "yaml"))
        .collect();
    files.sort();
    files
}

#[test]
fn manifest_command_lines_are_valid_and_match_their_pods() {
    let mut containers = 0;
    for file in files() {
        println!("{}", file.display());
        let manifest = fs::read_to_string(&file).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&manifest).unwrap();
        let mut found = Vec::new();
        for document in &documents {
            pods(document, &mut found);
        }
        assert!(!found.is_empty(), "no pod");
        if file.ends_with("agent-node-interface.yaml") {
            let inits = found
                .iter()
                .map(|pod| list(at(pod, "/initContainers")).len());
            assert_eq!(inits.collect::<Vec<_>>(), [1]);
        }
        for pod in found {
            assert_init_containers(pod);
            let specs = list(at(pod, "/containers")).iter();
            for spec in specs.filter(|spec| spec.get("args").is_some()) {
                let (container, folder) = (Container { pod, spec }, TempDir::new().unwrap());
                let facts = container.plan(folder.path());
                container.probes_fit(&facts);
                container.drain_fits(&facts);
                container.rights_fit(&facts);
                containers += 1;
            }
        }
    }
    assert!(containers >= 8, "{containers} containers");
}
