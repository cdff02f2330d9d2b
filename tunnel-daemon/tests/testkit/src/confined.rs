//! Processes with few rights: under a seccomp profile of `deploy/seccomp`, and as a user that owns nothing.
//!
//! The launcher is this test binary, started again. It installs the filters and then executes the program.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfMap, BpfProgram};
use serde_json::{Value, json};

use super::process::{Process, built};
use seccomp_filters::filters;

#[path = "../../../seccomp_filters.rs"]
mod seccomp_filters;

/// The user and the group that own nothing.
pub const NOBODY: u32 = 65534;
/// Environment variable with the launcher's task, as JSON.
const TASK: &str = "ADIT_TEST_LAUNCH";
/// The test that acts as the launcher.
const LAUNCHER: &str = "cases::least_privilege::launcher_becomes_the_program";

/// A profile in the format of container runtimes.
#[derive(Clone)]
pub struct Profile(Value);

impl Profile {
    /// The file `deploy/seccomp/NAME.json`.
    pub fn of(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/seccomp");
        let text = fs::read_to_string(folder.join(format!("{name}.json"))).expect("a profile");
        let profile: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        assert_eq!(profile["defaultErrnoRet"], libc::EPERM);
        Self(profile)
    }

    /// Allows further calls, whatever the profile says about them.
    pub fn with(mut self, names: &[&str]) -> Self {
        let rules = self.0["syscalls"].as_array_mut().expect("rules");
        let named = |rule: &Value| {
            rule["names"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| names.iter().any(|name| one == name)))
        };
        rules.retain(|rule| !named(rule));
        rules.push(json!({"names": names, "action": "SCMP_ACT_ALLOW"}));
        self
    }
}

/// What a process may do.
#[derive(Clone)]
pub struct Rights {
    /// The system calls that it may make.
    pub profile: Profile,
    /// Whether an unlisted call kills the process, which no program can ignore. Otherwise the call fails, as in production.
    pub deadly: bool,
    /// The user that it runs as; `None` for the user of the tests.
    pub user: Option<u32>,
    /// Limit on the processes and threads of its user.
    pub threads: Option<u64>,
}

/// Starts `adit` with these rights; see [`Process::start`].
pub fn start(name: &str, rights: &Rights, args: &[String], dir: &Path) -> Process {
    let command = command(&built(), args, rights);
    Process::start_command(name, command, dir)
}

/// A command that runs `program` with these rights.
pub fn command(program: &Path, args: &[String], rights: &Rights) -> Command {
    let otherwise = if rights.deadly {
        json!("kill_process")
    } else {
        json!({"errno": libc::EPERM})
    };
    // Passed as open files, because another user may not be able to reach their folder.
    let (launcher, program) = (
        inherited(&std::env::current_exe().expect("it")),
        inherited(program),
    );
    let task = json!({
        "program": path_of(&program),
        "args": args,
        "filters": filters(&rights.profile.0, &otherwise).expect("a known profile"),
        "threads": rights.threads,
    });
    let mut command = Command::new(path_of(&launcher));
    command
        .args(["--exact", LAUNCHER, "--test-threads=1"])
        .env(TASK, task.to_string())
        .env("TMPDIR", "/tmp")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if let Some(user) = rights.user {
        command.uid(user).gid(user);
    }
    // The files stay open until the tests end: the command may be started at any time.
    std::mem::forget((launcher, program));
    command
}

fn inherited(program: &Path) -> File {
    let file = File::open(program).expect("the program is there");
    fcntl_setfd(&file, FdFlags::empty()).expect("an open file");
    file
}

fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Does the launcher's task, if there is one.
pub fn launch_if_asked() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let task: Value = serde_json::from_str(&task).expect("a task");
    let args = task["args"].as_array().expect("arguments");
    let args: Vec<&str> = args.iter().filter_map(Value::as_str).collect();
    let (called, rest) = args.split_first().expect("a name");
    let mut command = Command::new(task["program"].as_str().expect("a program"));
    command.arg0(called).args(rest).env_remove(TASK);
    let filters = task["filters"].as_array().expect("filters");
    let arch = std::env::consts::ARCH
        .try_into()
        .expect("a known processor");
    let programs: Vec<BpfProgram> = filters
        .iter()
        .map(|filter| {
            let text = filter.to_string();
            let compiled: BpfMap =
                seccompiler::compile_from_json(text.as_bytes(), arch).expect("a filter");
            compiled["main"].clone()
        })
        .collect();
    if let Some(threads) = task["threads"].as_u64() {
        let limit = Rlimit {
            current: Some(threads),
            maximum: Some(threads),
        };
        setrlimit(Resource::Nproc, limit).expect("a lower limit");
    }
    // The last filter is the allow list, which does not contain seccomp(2).
    for program in &programs {
        seccompiler::apply_filter(program).expect("a filter");
    }
    panic!("becoming the program: {}", command.exec());
}

/// Makes the user the owner of a folder and of everything in it.
pub fn give(folder: &Path, user: u32) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        if entry.path().is_dir() {
            give(&entry.path(), user);
        } else {
            std::os::unix::fs::chown(entry.path(), Some(user), Some(user)).expect("root may");
        }
    }
    std::os::unix::fs::chown(folder, Some(user), Some(user)).expect("root may");
}
