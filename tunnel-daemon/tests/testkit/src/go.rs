//! Builds the Go peers, once per state of their sources, into `target/interop/`.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use super::skip;

/// A pinned upstream release that the tests run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Release {
    /// The reference.
    V0360,
    /// Older release: its server ignores DRAIN.
    V0340,
    /// Older release: it has no DRAIN.
    V0303,
    /// Newer client library, with a tunnel that is used again.
    V0370,
}

/// A program of the Go modules beside these tests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Program {
    Server(Release),
    Agent(Release),
    /// Upstream's integration tests, which run an agent as an external program.
    Suite,
    /// Our own clients, targets and stubs.
    Peer,
    /// Our peer program, built with the client library of this release. Its other dependencies are unchanged.
    OtherPeer(Release),
}

impl Program {
    fn package(self) -> &'static str {
        match self {
            Self::Server(_) => "sigs.k8s.io/apiserver-network-proxy/cmd/server",
            Self::Agent(_) => "sigs.k8s.io/apiserver-network-proxy/cmd/agent",
            Self::Suite => "sigs.k8s.io/apiserver-network-proxy/tests",
            Self::Peer | Self::OtherPeer(_) => "./cmd/peer",
        }
    }

    fn folder(self) -> PathBuf {
        let go = Path::new(env!("CARGO_MANIFEST_DIR")).join("../interop/go");
        match self {
            Self::Server(Release::V0360)
            | Self::Agent(Release::V0360)
            | Self::Peer
            | Self::OtherPeer(_) => go,
            Self::Suite => go.join("suite"),
            Self::Server(Release::V0340) | Self::Agent(Release::V0340) => go.join("v0.34.0"),
            Self::Server(Release::V0303) | Self::Agent(Release::V0303) => go.join("v0.30.3"),
            Self::Server(Release::V0370) | Self::Agent(Release::V0370) => {
                unreachable!("of 0.37.0 the client library is tested")
            }
        }
    }

    fn name(self) -> String {
        match self {
            Self::Server(release) => format!("server-{release:?}").to_lowercase(),
            Self::Agent(release) => format!("agent-{release:?}").to_lowercase(),
            Self::Suite => "suite".to_owned(),
            Self::Peer => "peer".to_owned(),
            Self::OtherPeer(release) => format!("peer-{release:?}").to_lowercase(),
        }
    }

    /// Flag of `go` that replaces the folder's `go.mod`.
    fn modules(self) -> Option<&'static str> {
        match self {
            Self::OtherPeer(Release::V0340) => Some("-modfile=client-v0.34.0.mod"),
            Self::OtherPeer(Release::V0303) => Some("-modfile=client-v0.30.3.mod"),
            Self::OtherPeer(Release::V0370) => Some("-modfile=client-v0.37.0.mod"),
            Self::OtherPeer(Release::V0360)
            | Self::Server(_)
            | Self::Agent(_)
            | Self::Suite
            | Self::Peer => None,
        }
    }

    /// Subcommand of `go` that builds the program.
    fn recipe(self) -> &'static [&'static str] {
        match self {
            Self::Suite => &["test", "-c"],
            Self::OtherPeer(Release::V0370) => &["build", "-tags=reusable"],
            Self::Server(_) | Self::Agent(_) | Self::Peer | Self::OtherPeer(_) => &["build"],
        }
    }
}

/// The `go` command: `ADIT_GO`, or the first on PATH that runs. `None` without one.
pub fn toolchain() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let command = env::var_os("ADIT_GO").map_or_else(|| PathBuf::from("go"), PathBuf::from);
        let runs = Command::new(&command)
            .arg("version")
            .output()
            .is_ok_and(|out| out.status.success());
        runs.then_some(command)
    };
    FOUND.get_or_init(find).as_deref()
}

/// Path of a built program, building it first when its sources changed. Needs [`toolchain`].
pub fn binary(program: Program) -> PathBuf {
    static BUILT: Mutex<BTreeMap<Program, Arc<OnceLock<PathBuf>>>> = Mutex::new(BTreeMap::new());
    let cell = {
        let mut built = BUILT.lock().expect("nothing panics while it holds the map");
        Arc::clone(built.entry(program).or_default())
    };
    // A second test that needs the program waits here. Tests that need other programs continue.
    cell.get_or_init(|| build(program)).clone()
}

fn build(program: Program) -> PathBuf {
    let go = toolchain().expect("tests without a Go toolchain are skipped before they get here");
    let test = env::current_exe().expect("this test");
    let target = test
        .ancestors()
        .nth(3)
        .expect("tests are in target/PROFILE/deps");
    let root = target.join("interop");
    fs::create_dir_all(&root).expect("target/ is writable");
    // Two test processes may build the same program, so the folder is locked. A user who does not own it can lock it, too.
    let path = root.join(".lock");
    let lock = File::create(&path)
        .or_else(|_not_ours| File::open(&path))
        .expect("target/ is writable, or was built in before");
    lock.lock().expect("files can be locked");

    let folder = program.folder();
    let out = root.join(format!(
        "{}-{:016x}",
        program.name(),
        fingerprint(go, program, &folder)
    ));
    if out.exists() {
        return out;
    }
    let partial = out.with_extension("partial");
    skip::say(&format!(
        "building {} with Go; minutes the first time",
        program.name()
    ));
    let status = Command::new(go)
        .args(program.recipe())
        .args(program.modules())
        .args(["-trimpath", "-o"])
        .arg(&partial)
        .arg(program.package())
        .current_dir(&folder)
        .env("CGO_ENABLED", "0") // as upstream's images are built; it decides which resolver the agent has
        .env("GOWORK", "off")
        .status()
        .expect("go runs");
    assert!(
        status.success(),
        "building {program:?} failed: run `go {} {} {}` in {}",
        program.recipe().join(" "),
        program.modules().unwrap_or_default(),
        program.package(),
        folder.display()
    );
    fs::rename(&partial, &out).expect("the built program can be renamed");
    out
}

/// Changes with the toolchain or the sources; for upstream's programs only with the pinned modules. It names a cached build,
/// so it need not be cryptographic.
fn fingerprint(go: &Path, program: Program, folder: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let version = Command::new(go)
        .arg("version")
        .output()
        .expect("go runs")
        .stdout;
    version.hash(&mut hasher);
    if matches!(program, Program::Peer | Program::OtherPeer(_)) {
        hash_files(folder, &mut hasher);
    } else {
        for name in ["go.mod", "go.sum"] {
            hash_file(&folder.join(name), &mut hasher);
        }
    }
    hasher.finish()
}

fn hash_files(folder: &Path, hasher: &mut DefaultHasher) {
    let entries = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("the folder can be read").path())
        .collect();
    paths.sort();
    for path in paths {
        if path.join("go.mod").exists() {
            continue; // another module
        }
        if path.is_dir() {
            hash_files(&path, hasher);
        } else {
            hash_file(&path, hasher);
        }
    }
}

fn hash_file(path: &Path, hasher: &mut DefaultHasher) {
    path.file_name().hash(hasher);
    fs::read(path)
        .unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
        .hash(hasher);
}
