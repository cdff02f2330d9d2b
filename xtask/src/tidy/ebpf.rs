//! eBPF programs use only the kernel's stable interface, and their first lines state their hook and requirements.

use std::fmt::Write as _;

use toml::Table;

use crate::workspace::Workspace;

/// Packages compiled into the object, and the crates each may use. Other crates may contain bindings of one kernel.
const PACKAGES: &[(&str, &[&str])] = &[
    ("ebpf-programs/programs", &["adit-ebpf-abi", "aya-ebpf"]),
    ("ebpf-programs/abi", &[]),
];

/// Contexts of the kernel's stable interface, by aya's names, and the trait of all contexts.
const CONTEXTS: &[&str] = &[
    "EbpfContext",
    "SkBuffContext",
    "SkMsgContext",
    "SockAddrContext",
    "SockOpsContext",
];

/// Prefixes of names that depend on one kernel's structs: helpers that read kernel memory, hooks inside the kernel, bindings.
const FOREIGN: &[&str] = &[
    "bpf_copy_from_user",
    "bpf_core_",
    "bpf_get_current_task",
    "bpf_probe_read",
    "bpf_skc_to_",
    "btf_tracepoint",
    "container_of",
    "fentry",
    "fexit",
    "include",
    "kprobe",
    "kretprobe",
    "lsm",
    "perf_event",
    "pt_regs",
    "raw_tracepoint",
    "read_kernel",
    "sock_common",
    "task_struct",
    "tracepoint",
    "transmute",
    "uprobe",
    "uretprobe",
    "vmlinux",
];

/// Statements in the first lines of a program, and their permitted prefixes.
const HEAD: &[(&str, &[&str])] = &[
    ("its hook", &["Hook: ", "Hooks: "]),
    ("its kernel floor", &["Floor: Linux "]),
    ("its licence", &["Licence: "]),
    (
        "its maps and their sizes",
        &["Map, entries at most: ", "Maps, entries at most: "],
    ),
    ("what it does when something is missing", &["Missing "]),
];

/// Checks the programs and the package that they share with the daemon.
///
/// # Errors
/// A source cannot be read, or a manifest is not valid TOML.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for (package, allowed) in PACKAGES {
        let file = format!("{package}/Cargo.toml");
        let manifest: Table = toml::from_str(&workspace.text(&file)?.unwrap_or_default())?;
        let used = manifest.get("dependencies").and_then(|all| all.as_table());
        for name in used.into_iter().flat_map(Table::keys) {
            if !allowed.contains(&name.as_str()) {
                findings.push(format!(
                    "{file}: `{name}` is no crate that programs may use"
                ));
            }
        }
        for file in workspace.files(package)? {
            if file.ends_with(".rs") {
                let text = workspace.text(&file)?.unwrap_or_default();
                findings.extend(foreign(&text).map(|what| format!("{file}:{what}")));
                findings.extend(missing(&text).map(|what| format!("{file}:1: {what}")));
            }
        }
    }
    Ok(findings)
}

/// Line and name of each use that depends on one kernel's structs.
fn foreign(text: &str) -> impl Iterator<Item = String> {
    let code = (1..).zip(text.lines());
    let code = code.filter(|(_, line)| !line.trim_start().starts_with("//"));
    let words = code.flat_map(|(number, line)| {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.map(move |word| (number, word))
    });
    words.filter_map(|(number, word): (usize, &str)| {
        let is_context = word.ends_with("Context") && !CONTEXTS.contains(&word);
        let is_foreign = FOREIGN.iter().any(|begin| word.starts_with(begin));
        let what = "is nothing that the kernel promises to user space";
        (is_context || is_foreign).then(|| format!("{number}: `{word}` {what}"))
    })
}

/// Statements that a program's first lines lack. A file without a hook is not a program.
fn missing(text: &str) -> impl Iterator<Item = String> {
    let hooks = text
        .lines()
        .filter(|line| line.starts_with("use aya_ebpf::macros::"));
    let is_program = hooks.into_iter().any(|line| !line.contains("::map;"));
    let mut head = String::new();
    for line in text.lines().map_while(|line| line.strip_prefix("//!")) {
        write!(head, "{} ", line.trim()).ok();
    }
    let left_out = move |(_, begins): &&(&str, &[&str])| {
        is_program && !begins.iter().any(|begin| head.contains(begin))
    };
    HEAD.iter().filter(left_out).map(|(what, begins)| {
        let wanted = begins.join("` or `");
        format!("a program does not say {what}: `{wanted}`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_to_kernel_structs_is_found() {
        for (text, count) in [
            ("use aya_ebpf::helpers::bpf_probe_read_kernel;", 1),
            ("use aya_ebpf::programs::ProbeContext;", 1),
            ("#[aya_ebpf::macros::kprobe]\nfn f() {}", 1),
            ("use aya_ebpf::bindings::pt_regs;", 1),
            ("include!(\"bindings.rs\");", 1),
            (
                "use aya_ebpf::programs::{SockAddrContext, SockOpsContext};\n// bpf_probe_read",
                0,
            ),
        ] {
            assert_eq!(foreign(text).count(), count, "{text}");
        }
    }

    #[test]
    fn a_program_with_an_incomplete_header_is_found() {
        let text = "//! Counts.\n//!\n//! Hook: cgroup `sock_ops`. Floor: Linux 5.8. Licence: any. Map, entries\n\
                    //! at most: WORDS 16,384. Missing it: nothing.\nuse aya_ebpf::macros::sock_ops;\n";
        assert_eq!(missing(text).count(), 0);
        for word in [
            "Hook: ",
            "Floor: Linux ",
            "Licence: ",
            "at most: ",
            "Missing ",
        ] {
            assert_eq!(missing(&text.replace(word, "")).count(), 1, "{word}");
        }
        assert_eq!(
            missing("//! Helps.\nuse aya_ebpf::macros::map;\n").count(),
            0
        );
    }
}
