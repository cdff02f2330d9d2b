//! A program as a container runtime starts it: in a root of its own, as a user without any right, under a seccomp profile.
//!
//! The launcher is this program, started again; it takes all that upon itself and becomes the other one.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use rustix::process::{Gid, Uid, chdir, chroot};
use rustix::thread::{
    CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use seccompiler::{BpfMap, BpfProgram};
use serde_json::{Value, json};

use seccomp_filters::filters;

#[path = "../../../tunnel-daemon/seccomp_filters.rs"]
mod seccomp_filters;

/// What the launcher is told.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    root: PathBuf,
    #[arg(long)]
    user: u32,
    /// Filters as seccompiler reads them, in the order to apply.
    #[arg(long)]
    filters: String,
    #[arg(trailing_var_arg = true, required = true)]
    program: Vec<String>,
}

/// What a container is: its root, its user, its seccomp profile, if it has one, and what runs its programs, if the processor does not.
pub(super) struct Container {
    pub(super) root: PathBuf,
    pub(super) user: u32,
    pub(super) profile: Option<PathBuf>,
    /// As seen in the root.
    pub(super) emulator: Option<PathBuf>,
}

impl Container {
    /// A command that starts a program in it.
    ///
    /// # Errors
    /// The profile has something that is not known here.
    pub(super) fn command(&self, program: &[&str]) -> anyhow::Result<Command> {
        let filters = match &self.profile {
            Some(profile) => {
                let text = fs::read_to_string(profile)
                    .with_context(|| format!("read {}", profile.display()))?;
                of_profile(&serde_json::from_str(&text)?)?
            }
            None => Vec::new(),
        };
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("confined")
            .arg("--root")
            .arg(&self.root)
            .args(["--user", &self.user.to_string()])
            .args(["--filters", &json!(filters).to_string(), "--"])
            .args(&self.emulator)
            .args(program)
            .env_clear()
            .env("PATH", "/usr/bin:/bin");
        Ok(command)
    }
}

/// What a profile says, with its own error for calls that it does not list.
fn of_profile(profile: &Value) -> anyhow::Result<Vec<Value>> {
    let otherwise = json!({"errno": profile["defaultErrnoRet"]});
    filters(profile, &otherwise).map_err(anyhow::Error::msg)
}

/// Becomes the program.
///
/// # Errors
/// Always when it returns.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let arch = std::env::consts::ARCH
        .try_into()
        .context("a processor that filters are known for")?;
    let filters: Vec<Value> = serde_json::from_str(&args.filters)?;
    let mut programs: Vec<BpfProgram> = Vec::new();
    for filter in &filters {
        let text = filter.to_string();
        let mut compiled: BpfMap = seccompiler::compile_from_json(text.as_bytes(), arch)?;
        programs.extend(compiled.remove("main"));
    }
    let (name, rest) = args.program.split_first().context("a program")?;
    let mut command = Command::new(name);
    command.args(rest);
    chroot(&args.root).with_context(|| format!("make {} the root", args.root.display()))?;
    chdir("/")?;
    for capability in CapabilitySet::all().iter() {
        // The kernel refuses those that it does not know.
        remove_capability_from_bounding_set(capability).ok();
    }
    let (user, group) = (Uid::from_raw(args.user), Gid::from_raw(args.user));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    set_no_new_privs(true)?;
    // The last one is the list of allowed calls, which does not have seccomp(2).
    for program in &programs {
        seccompiler::apply_filter(program)?;
    }
    bail!("start {name}: {}", command.exec())
}

/// What `/proc/PID/status` says of a process that has no right.
///
/// # Errors
/// It has one, or is another user, or has no filter where `is_filtered` says that there is to be one.
pub(super) fn ensure_confined(process: u32, user: u32, is_filtered: bool) -> anyhow::Result<()> {
    let file = Path::new("/proc").join(process.to_string()).join("status");
    let status = fs::read_to_string(&file)?;
    let none = "0000000000000000";
    for (name, wanted) in [
        ("Uid", format!("{user}\t{user}\t{user}\t{user}")),
        ("Gid", format!("{user}\t{user}\t{user}\t{user}")),
        ("Groups", String::new()),
        ("CapPrm", none.to_owned()),
        ("CapEff", none.to_owned()),
        ("CapBnd", none.to_owned()),
        ("NoNewPrivs", "1".to_owned()),
    ]
    .into_iter()
    .chain(is_filtered.then(|| ("Seccomp", "2".to_owned())))
    {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let found = line.map(str::trim);
        anyhow::ensure!(
            found == Some(&*wanted),
            "{}: {name} is {found:?}, not {wanted:?}",
            file.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn our_seccomp_profiles_compile() {
        let workspace = Workspace::here().unwrap();
        for name in ["server", "agent"] {
            let text = workspace.text(&format!("deploy/seccomp/{name}.json"));
            let profile = serde_json::from_str(&text.unwrap().unwrap()).unwrap();
            for filter in of_profile(&profile).unwrap() {
                let arch = std::env::consts::ARCH.try_into().unwrap();
                let compiled: BpfMap =
                    seccompiler::compile_from_json(filter.to_string().as_bytes(), arch).unwrap();
                assert!(compiled.contains_key("main"), "{name}");
            }
        }
    }
}
