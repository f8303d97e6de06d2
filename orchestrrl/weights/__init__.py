"""The weight backend of weight sync: what holds, sends, receives and installs a version. Deciding is
weights/controller/controller.py."""
