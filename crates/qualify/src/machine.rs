//! The machine and the clock, as receipts describe them: no host name, no user, no folder.

use std::{
    fs,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::receipt::Machine;

/// This machine.
pub fn describe() -> Machine {
    Machine {
        cpu: cpu().unwrap_or_else(|| "unknown".into()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: memory().map_or(0, |bytes| (bytes + (1 << 29)) >> 30),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
    }
}

fn cpu() -> Option<String> {
    if cfg!(target_os = "macos") {
        return sysctl("machdep.cpu.brand_string");
    }
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory() -> Option<u64> {
    if cfg!(target_os = "macos") {
        return sysctl("hw.memsize")?.parse().ok();
    }
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 =
        info.lines().find(|l| l.starts_with("MemTotal"))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

fn sysctl(name: &str) -> Option<String> {
    let out = Command::new("sysctl").args(["-n", name]).output().ok()?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned()).filter(|s| !s.is_empty())
}

/// The present moment, UTC, as `2026-01-31T12:34:56Z`.
pub fn now() -> String {
    stamp(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

/// Seconds since 1970 as a UTC stamp.
fn stamp(seconds: u64) -> String {
    // Days are counted from 0000-03-01, so that the leap day ends a year; 400 years have 146,097 days.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let second = seconds % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", era * 400 + year + carry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(stamp(seconds), text);
        }
    }

    #[test]
    fn the_machine_is_described_without_its_name() {
        let m = describe();
        assert!(m.cores > 0 && !m.cpu.is_empty());
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let text = format!("{m:?}");
        assert!(host.trim().is_empty() || !text.contains(host.trim()), "{text}");
    }
}
