//! Kernel features that a command line asks for, redirect and accounting: whether the kernel would allow them now.
//!
//! Their absence does not keep a server or agent from starting, so this command reports it beforehand.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::process::geteuid;
use rustix::thread::CapabilitySet;

use super::rules::Followed;
use crate::check::line::{degraded, missing, ok};
use crate::status::model::Capability;
use adit_config::ConfigError;
use adit_config::plan::{
    AccountMode, AccountPlan, NetnsPlan, NodeRedirectPlan, OnFailure, Program, RedirectPlan,
    RuleFile,
};
use adit_host::capabilities::of_this_process;
use adit_host::cgroup::{PART_OF_HOST, WHOLE_HOST, is_part_of_host};
use adit_host::interfaces::local_addresses;
use adit_redirect::caps::{self, HostCaps};
use adit_redirect::pins::bpffs_mount;

/// Kernel features of this host.
pub(crate) struct Host(HostCaps);

impl Host {
    /// Probes the kernel without loading this project's programs.
    pub(crate) fn probe() -> Self {
        Self(HostCaps::probe())
    }

    /// Probes the kernel, including whether it accepts this project's programs.
    pub(crate) fn probe_programs() -> Self {
        Self(HostCaps::probe().with_programs())
    }

    /// Whether programs can be loaded: the first missing feature with its remedy.
    pub(crate) fn loading(&self) -> Capability {
        // This project's programs need no type information.
        let needed = self.0.rows().into_iter().filter(|(what, _)| *what != "btf");
        let needed = needed.chain([("bpf", &self.0.account_program)]);
        let line = match first_missing(needed) {
            Some(why) => degraded(
                why,
                "of use for --redirect and --account only; all else works without",
            ),
            None => ok(format!("{}: --redirect and --account", self.0.bpf.reason())),
        };
        line.named("ebpf")
    }

    /// Lines about a server's redirect.
    pub(crate) fn redirect(&self, plan: &RedirectPlan) -> Vec<Capability> {
        let count = |all: RedirectPlan| all.targets.len() + all.excluded.len();
        let rules = match &plan.file {
            None => Ok(count(plan.clone())),
            Some(path) => of_file(path, Program::Server, |file| plan.with(file).map(count)),
        };
        let mut lines = vec![self.programs(), cgroup(&plan.cgroup), rules_line(rules)];
        if plan.on_failure == OnFailure::Closed {
            lines.push(pinned(bpffs_mount().and_then(writable)));
        }
        lines.extend(plan.netns.iter().flat_map(namespaces));
        lines
    }

    /// Lines about an agent's redirect.
    pub(crate) fn node_redirect(&self, plan: &NodeRedirectPlan) -> Vec<Capability> {
        let count = |all: NodeRedirectPlan| all.services.len();
        let rules = match &plan.file {
            None => Ok(count(plan.clone())),
            Some(path) => of_file(path, Program::Agent, |file| plan.with(file).map(count)),
        };
        let mut lines = vec![self.programs(), cgroup(&plan.cgroup), rules_line(rules)];
        let here = local_addresses();
        let at = plan.node_addresses.iter();
        lines.extend(at.map(|ip| node_address(*ip, &here)));
        lines.extend(plan.netns.iter().flat_map(namespaces));
        lines
    }

    fn programs(&self) -> Capability {
        let needed = [
            ("capabilities", &self.0.capabilities),
            ("bpf", &self.0.bpf),
            ("cgroup2", &self.0.cgroup2),
        ];
        let line = match first_missing(needed) {
            None => ok("the kernel takes its programs, and there are the rights to attach them"),
            Some(why) => missing(
                format!("nothing would be captured: {why}"),
                "provide what this line names, or drop the --redirect flags",
            ),
        };
        line.named("redirect")
    }

    /// The line about accounting; `None` if it is off.
    pub(crate) fn account(&self, plan: AccountPlan) -> Option<Capability> {
        const REMEDY: &str = "provide what this line names, or --account=off";
        let needed = [
            ("capabilities", &self.0.for_account),
            ("bpf", &self.0.account_program),
            ("cgroup2", &self.0.cgroup2),
            ("ring-buffer", &self.0.ring_buffer),
        ];
        let line = match (plan.mode, first_missing(needed)) {
            (AccountMode::Off, _) => return None,
            (_, None) => ok("the kernel can account for connections"),
            (AccountMode::Auto, Some(why)) => {
                degraded(format!("--account=auto would be off: {why}"), REMEDY)
            }
            (AccountMode::On, Some(why)) => {
                missing(format!("nothing would be accounted: {why}"), REMEDY)
            }
        };
        Some(line.named("account"))
    }
}

/// All missing features of this host, in one line.
pub(crate) fn lacks() -> String {
    let caps = HostCaps::probe();
    let missing: Vec<String> = caps
        .rows()
        .into_iter()
        .filter(|(_, capability)| !capability.is_ready())
        .map(|(name, capability)| format!("{name}: {}", capability.reason()))
        .collect();
    if missing.is_empty() {
        return "has all that is known to be needed".to_owned();
    }
    missing.join("; ")
}

/// The first needed feature that the host lacks.
fn first_missing<'a>(
    needed: impl IntoIterator<Item = (&'static str, &'a caps::Capability)>,
) -> Option<String> {
    let (what, why) = needed.into_iter().find(|(_, there)| !there.is_ready())?;
    Some(format!("{what}: {}", why.reason()))
}

/// Tests for a file that every cgroup of version 2 has, and none of version 1.
fn cgroup(path: &Path) -> Capability {
    let shown = path.display();
    match fs::metadata(path.join("cgroup.controllers")) {
        Ok(_) => there(path, is_part_of_host(path)),
        Err(error) if path.is_dir() => missing(
            format!("{shown} is no cgroup of version 2: {error}"),
            "give a folder below the mount point that the line cgroup2 names",
        ),
        Err(error) => missing(
            format!("nothing would be captured: {shown}: {error}"),
            "create the cgroup before the start, or correct --redirect-cgroup",
        ),
    }
    .named("redirect-cgroup")
}

/// The line of an attachable cgroup, which may look like the host's root and be only a part of the host.
fn there(path: &Path, is_part: bool) -> Capability {
    let shown = path.display();
    match is_part {
        true => degraded(format!("{shown} is {PART_OF_HOST}"), WHOLE_HOST),
        false => ok(format!("{shown} is a cgroup")),
    }
}

fn of_file(
    path: &Path,
    of: Program,
    count: impl FnOnce(RuleFile) -> Result<usize, ConfigError>,
) -> Result<usize, String> {
    let (_followed, file) = Followed::load(path, of).map_err(|error| format!("{error:#}"))?;
    count(file).map_err(|error| format!("--redirect-file {}: {error}", path.display()))
}

fn rules_line(rules: Result<usize, String>) -> Capability {
    let line = match rules {
        Ok(0) => degraded(
            "no rule yet: nothing is captured until the file has one",
            "add rules to the file",
        ),
        Ok(count) => ok(format!("{count} of flags and file fit together")),
        Err(why) => missing(why, "correct the file: it would not start like this"),
    };
    line.named("redirect-rules")
}

/// Whether this user can create folders in the mount: one that belongs to root refuses, whatever the user's capabilities.
fn writable(mount: PathBuf) -> Result<PathBuf, String> {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    match accessat(CWD, mount.as_path(), wanted, AtFlags::EACCESS) {
        Ok(()) => Ok(mount),
        Err(error) => Err(format!(
            "this user may not make a folder in {}: {error}",
            mount.display()
        )),
    }
}

/// Whether other users can create folders there, too: such a folder may block a pin, and only root can remove it.
fn is_shared(mount: &Path) -> bool {
    fs::metadata(mount).is_ok_and(|mount| mount.mode() & 0o022 != 0)
}

fn pinned(mount: Result<PathBuf, String>) -> Capability {
    let line = match mount {
        Ok(mount) if !geteuid().is_root() && is_shared(&mount) => degraded(
            format!(
                "other users may make folders in {}, too, and keep this program from pinning there: then nothing is denied",
                mount.display()
            ),
            "mount bpffs for this user alone (mode=0700)",
        ),
        Ok(mount) => ok(format!("links can be kept in {}", mount.display())),
        Err(why) => missing(
            format!("nothing would be captured, or denied: {why}"),
            "mount bpffs where this user may write, or give --redirect-on-failure=open",
        ),
    };
    line.named("redirect-closed")
}

fn node_address(ip: IpAddr, here: &[IpAddr]) -> Capability {
    let line = match here.contains(&ip) {
        true => ok(format!("{ip} is an address of this host")),
        false => missing(
            format!("nothing would be captured: {ip} is no address of this host"),
            "correct --redirect-node-address",
        ),
    };
    line.named("redirect-node")
}

fn namespaces(plan: &NetnsPlan) -> Vec<Capability> {
    let mut lines = vec![helper(of_this_process().contains(CapabilitySet::SYS_ADMIN))];
    let absent = plan.paths.iter().filter(|path| !path.exists());
    lines.extend(absent.map(|path| {
        degraded(
            format!("{} is not there; captured once it is", path.display()),
            "create it, or correct --redirect-netns",
        )
    }));
    let lines = lines.into_iter();
    lines.map(|line| line.named("redirect-netns")).collect()
}

fn helper(may: bool) -> Capability {
    match may {
        true => ok("listeners can be opened in other network namespaces, by a helper"),
        false => missing(
            "without CAP_SYS_ADMIN other network namespaces would not be captured, only our own",
            "give it CAP_SYS_ADMIN at the start: only its small helper keeps it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::status::model::Verdict;
    use adit_config::plan::{AgentCalls, RedirectTarget};

    fn host() -> Host {
        let ready = || caps::Capability::Ready("yes".to_owned());
        Host(HostCaps {
            capabilities: ready(),
            for_account: ready(),
            bpf: ready(),
            account_program: ready(),
            btf: ready(),
            cgroup2: ready(),
            ring_buffer: ready(),
        })
    }

    fn no() -> caps::Capability {
        caps::Capability::Missing("not today".to_owned())
    }

    fn plan() -> RedirectPlan {
        RedirectPlan {
            targets: vec!["10.0.0.0/8".parse().unwrap()],
            excluded: Vec::new(),
            cgroup: "/nonexistent/cgroup".into(),
            on_failure: OnFailure::Open,
            agents: AgentCalls::Exempt,
            file: None,
            netns: None,
        }
    }

    fn of<'a>(lines: &'a [Capability], name: &str) -> &'a Capability {
        let found = lines.iter().find(|line| line.name == name);
        found.unwrap_or_else(|| panic!("no line {name}: {lines:?}"))
    }

    #[test]
    fn missing_host_features_are_named_in_the_lines_of_redirect_and_account() {
        type Change = fn(&mut HostCaps);
        let capabilities: Change = |host| (host.capabilities, host.for_account) = (no(), no());
        let bpf: Change = |host| (host.bpf, host.account_program) = (no(), no());
        let changes: [(&str, Change, bool); 5] = [
            ("capabilities", capabilities, true),
            ("bpf", bpf, true),
            ("bpf", |host| host.account_program = no(), false),
            ("cgroup2", |host| host.cgroup2 = no(), true),
            ("ring-buffer", |host| host.ring_buffer = no(), false),
        ];
        let plan_of = |mode| AccountPlan {
            mode,
            series_max: 1,
        };
        for (name, change, is_for_redirect) in changes {
            let mut host = host();
            change(&mut host.0);
            let redirect = host.programs();
            assert_eq!(redirect.verdict == Verdict::Missing, is_for_redirect);
            let on = host.account(plan_of(AccountMode::On)).unwrap();
            assert_eq!(on.verdict, Verdict::Missing, "{on:?}");
            assert!(on.text.contains(&format!("{name}: not today")), "{on:?}");
            let auto = host.account(plan_of(AccountMode::Auto)).unwrap();
            assert_eq!(auto.verdict, Verdict::Degraded, "{auto:?}");
            assert_eq!(host.account(plan_of(AccountMode::Off)), None);
        }
        assert_eq!(host().programs().verdict, Verdict::Ok);
        // A kernel that refuses a program of the redirect.
        let host_of_some = Host(HostCaps {
            bpf: no(),
            ..host().0
        });
        assert_eq!(host_of_some.programs().verdict, Verdict::Missing);
        let on = host_of_some.account(plan_of(AccountMode::On)).unwrap();
        assert_eq!(on.verdict, Verdict::Ok);
        // As without CAP_PERFMON before Linux 6.8.
        let host_of_old = Host(HostCaps {
            capabilities: no(),
            ..host().0
        });
        let on = host_of_old.account(plan_of(AccountMode::On)).unwrap();
        assert_eq!(on.verdict, Verdict::Ok);
        let on = host().account(plan_of(AccountMode::On)).unwrap();
        assert_eq!(on.verdict, Verdict::Ok);
    }

    #[test]
    fn only_cgroup_v2_folders_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let line = cgroup(dir.path());
        assert!(line.text.contains("no cgroup of version 2"), "{line:?}");
        let line = cgroup(&dir.path().join("none"));
        let remedy = line.remedy.as_deref().unwrap_or_default();
        assert!(remedy.contains("create"), "{line:?}");
        fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(cgroup(dir.path()).verdict, Verdict::Ok);
    }

    #[test]
    fn a_cgroup_root_inside_a_cgroup_namespace_is_degraded() {
        let line = there(Path::new("/sys/fs/cgroup"), true);
        assert_eq!(line.verdict, Verdict::Degraded, "{line:?}");
        let said = "/sys/fs/cgroup is only a part of the host";
        assert!(line.text.starts_with(said), "{line:?}");
        let remedy = line.remedy.as_deref().unwrap_or_default();
        assert!(remedy.contains("the host's cgroup namespace"), "{line:?}");
        let line = there(Path::new("/sys/fs/cgroup"), false);
        assert_eq!((line.verdict, line.remedy), (Verdict::Ok, None));
    }

    #[test]
    fn a_rule_file_is_checked_together_with_the_flags() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rules");
        let plan = RedirectPlan {
            file: Some(path.clone()),
            ..plan()
        };
        let line = || of(&host().redirect(&plan), "redirect-rules").clone();
        assert_eq!(line().verdict, Verdict::Missing, "no file");
        for (text, verdict, said) in [
            ("", Verdict::Ok, "1 of flags"),
            ("redirect 192.0.2.0/24", Verdict::Ok, "2 of flags"),
            ("redirect nonsense", Verdict::Missing, "line 1"),
            ("redirect-exclude 10.0.0.0/8", Verdict::Missing, "both name"),
        ] {
            fs::write(&path, text).unwrap();
            let line = line();
            assert_eq!(line.verdict, verdict, "{line:?}");
            assert!(line.text.contains(said), "{line:?}");
        }
        let plan = RedirectPlan {
            targets: Vec::<RedirectTarget>::new(),
            ..plan
        };
        fs::write(&path, "# none yet").unwrap();
        let lines = host().redirect(&plan);
        assert_eq!(of(&lines, "redirect-rules").verdict, Verdict::Degraded);
    }

    #[test]
    fn fail_closed_needs_a_place_for_pinned_links() {
        let names = |plan: &RedirectPlan| -> Vec<String> {
            let lines = host().redirect(plan);
            lines.into_iter().map(|line| line.name).collect()
        };
        assert!(!names(&plan()).iter().any(|name| name == "redirect-closed"));
        let closed = RedirectPlan {
            on_failure: OnFailure::Closed,
            ..plan()
        };
        assert!(names(&closed).iter().any(|name| name == "redirect-closed"));
        let own = tempfile::tempdir().unwrap();
        assert_eq!(pinned(Ok(own.path().to_owned())).verdict, Verdict::Ok);
        let open_to_all = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(own.path(), open_to_all).unwrap();
        assert!(is_shared(own.path()));
        let none = Err("mounted nowhere".to_owned());
        assert_eq!(pinned(none).verdict, Verdict::Missing);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(writable(dir.path().to_owned()), Ok(dir.path().to_owned()));
        let line = pinned(writable("/nonexistent/bpf".into()));
        assert!(line.text.contains("/nonexistent/bpf"), "{line:?}");
    }

    #[test]
    fn other_namespaces_need_sys_admin_and_may_appear_later() {
        assert_eq!(helper(true).verdict, Verdict::Ok);
        let without = helper(false);
        assert_eq!(without.verdict, Verdict::Missing, "{without:?}");
        assert!(without.text.contains("CAP_SYS_ADMIN"), "{without:?}");
        let plan = NetnsPlan {
            auto: false,
            paths: vec!["/nonexistent/netns".into(), "/proc/self/ns/net".into()],
        };
        let lines = namespaces(&plan);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].text.contains("/nonexistent/netns"), "{lines:?}");
    }

    #[test]
    fn a_foreign_node_address_is_reported() {
        let here = ["192.0.2.1".parse().unwrap()];
        assert_eq!(node_address(here[0], &here).verdict, Verdict::Ok);
        let other = node_address("2001:db8::1".parse().unwrap(), &here);
        assert_eq!(other.verdict, Verdict::Missing);
    }
}
