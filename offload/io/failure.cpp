#include "offload/io/failure.hpp"

#include <fmt/format.h>

#include <cerrno>

#include "runtime/base/quote.hpp"
#include "runtime/base/system_reason.hpp"

namespace zshard::offload {
namespace {

std::string remedy_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "Free space, or name another directory (offload.nvme_dir)";
    case EFBIG:
      return "Or name another directory (offload.nvme_dir)";
    case EROFS:
      return "The file system has become read-only: see the kernel's log (dmesg)";
    case EIO:
    case ENODEV:
    case ENXIO:
    case EREMOTEIO:
    case EILSEQ:
    case EBADMSG:
      return "The device reports an error: see the kernel's log (dmesg), or name another directory "
             "(offload.nvme_dir)";
    case EINVAL:
    case EOPNOTSUPP:
      return "The file system does not do this: name another directory (offload.nvme_dir), or try "
             "io_backend = posix";
    case ENOMEM:
    case EAGAIN:
      return "The system is short of memory for I/O: lower io_depth";
    default:
      return "See the kernel's log (dmesg), or name another directory (offload.nvme_dir)";
  }
}

std::string mismatch_text(const Mismatch& found) {
  const std::int64_t wrong = found.former + found.elsewhere + found.unknown;
  std::string text =
      fmt::format("{} of {} pages from offset {} on are not what was written last: ", wrong,
                  found.pages, found.offset);
  std::string parts;
  const auto add = [&parts](const std::string& part) {
    if (!parts.empty()) parts += ", ";
    parts += part;
  };
  if (found.former > 0) {
    add(fmt::format("{} hold{} what {} held before (the last write was {})", found.former,
                    found.former == 1 ? "s" : "", found.former == 1 ? "it" : "they",
                    found.former == found.pages ? "lost" : "lost or torn"));
  }
  if (found.elsewhere > 0) {
    add(fmt::format("{} hold{} what belongs to offset {} (a transfer was misplaced)",
                    found.elsewhere, found.elsewhere == 1 ? "s" : "", found.elsewhere_offset));
  }
  if (found.unknown > 0) {
    add(fmt::format("{} hold{} neither that nor what was there before (torn, misplaced or damaged)",
                    found.unknown, found.unknown == 1 ? "s" : ""));
  }
  return text + parts + ". Do not trust this device";
}

}  // namespace

std::string failure_text(const IoFailure& failure, const std::string& directory, int rank,
                         const std::string& lies_there, double deadline_seconds) {
  using Kind = IoFailure::Kind;
  const bool read = failure.operation == Operation::read;
  std::string text =
      fmt::format("{} of {} bytes at offset {} of the extent file in {} failed (rank {}{}{}): ",
                  failure.filling ? "first write (zeros)"
                  : read          ? "read"
                                  : "write",
                  failure.bytes, failure.offset, base::quoted(directory), rank,
                  lies_there.empty() ? "" : ", ", lies_there);
  switch (failure.kind) {
    case Kind::system:
      text += base::system_reason(failure.error);
      if (failure.done > 0) text += fmt::format(" after {} bytes", failure.done);
      return text + ". " + remedy_of(failure.error);
    case Kind::end_of_file:
      return text + fmt::format("the file ends after {} bytes of it. Something has cut the file",
                                failure.done);
    case Kind::no_progress:
      if (failure.error != 0) {
        return text + fmt::format("{}, again and again. {}", base::system_reason(failure.error),
                                  remedy_of(failure.error));
      }
      return text + fmt::format("short counts without progress after {} of {} bytes. {}",
                                failure.done, failure.bytes, remedy_of(EIO));
    case Kind::bad_count:
      return text + fmt::format("the system counts {} bytes, more than were asked for. {}",
                                failure.done, remedy_of(EIO));
    case Kind::mismatch:
      return text + mismatch_text(failure.found);
    case Kind::no_answer:
      return text + fmt::format(
                        "the device has not answered for {} s. See the kernel's log "
                        "(dmesg); a slower device takes a longer deadline_seconds",
                        deadline_seconds);
  }
  return text;
}

}  // namespace zshard::offload
